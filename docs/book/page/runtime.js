// Python for the pages: it runs in a worker (worker.js), which is started when it is first asked for and can be ended.

const python = { worker: null, waiting: new Map(), count: 0 };

async function pythonIsThere() {  // not from a file, nor where the site has no parts
  if (location.protocol === "file:") return false;
  const reply = await fetch("python/worker.js").catch(() => null);
  return Boolean(reply?.ok);
}

const NO_PYTHON = "This run was recorded. To read a document of your own the page needs Python's parts: " +
  "python -m docs.book fetches and serves them.";

function startPython() {
  python.worker = new Worker("python/worker.js", { type: "module" });
  python.worker.onmessage = ({ data: { id, answer, error, isAlive } }) => {
    const { done, failed, lives } = python.waiting.get(id);
    if (isAlive) return lives();
    python.waiting.delete(id);
    if (error === undefined) done(answer);
    else failed(new Error(error));
  };
}

function endPython(reason) {  // all that waits fails with the reason; the next question starts Python again
  python.worker?.terminate();
  python.worker = null;
  for (const { failed } of python.waiting.values()) failed(new Error(reason));
  python.waiting.clear();
}

function ask(module, name, given, wheels, lives = () => {}) {  // what a function of Python returns
  if (!python.worker) startPython();
  const id = python.count++;
  return new Promise((done, failed) => {
    python.waiting.set(id, { done, failed, lives });
    python.worker.postMessage({ id, module, name, given, wheels });
  });
}

function askWithin(seconds, module, name, given, wheels) {  // the same, but Python is ended if it says nothing for longer
  let timer;
  const lives = () => {
    clearTimeout(timer);
    timer = setTimeout(() => endPython(`it loops: nothing after ${seconds} seconds; Python was ended`), seconds * 1000);
  };
  lives();
  return ask(module, name, given, wheels, lives).finally(() => clearTimeout(timer));
}

function lastLine(error) {  // of a traceback: what was raised
  return error.message.trim().split("\n").at(-1);
}
