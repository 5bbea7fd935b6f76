// Python in a worker of its own, so that a page stays alive and can end it; runtime.js speaks with it.
// A message {id, module, name, given, wheels} is answered by {id, answer} or {id, error}; meanwhile by {id, isAlive}.

import { loadPyodide } from "./pyodide.mjs";

const NUMPY = "numpy-2.0.2-cp312-cp312-pyodide_2024_0_wasm32.whl";
const here = name => new URL(name, import.meta.url).href;

async function start() {  // modules are compiled when they are imported, so NumPy is unpacked, not loaded whole
  const content = name => fetch(here(name)).then(reply => reply.arrayBuffer());
  const archives = [["/lib/python3.12/site-packages", content(NUMPY)], ["/book", content("palimpsest.zip")]];
  const python = await loadPyodide({ indexURL: here("./") });
  for (const [extractDir, archive] of archives) python.unpackArchive(await archive, "zip", { extractDir });
  python.runPython("import sys; sys.path.insert(0, '/book'); import docs.book.live");
  return python;
}

const started = start();

async function answerTo({ id, module, name, given, wheels = [] }) {
  const python = await started;
  if (wheels.length) await python.loadPackage(wheels.map(here), { messageCallback() {} });
  const live = python.pyimport("docs.book.live");
  live.alive = () => postMessage({ id, isAlive: true });
  for (const file of given.files ?? []) {
    if (python.FS.analyzePath(`/book/${file}`).exists) continue;
    const name = file.split("/").at(-1);
    const reply = await fetch(here(name));
    python.FS.mkdirTree(`/book/${file.slice(0, -name.length)}`);
    python.FS.writeFile(`/book/${file}`, new Uint8Array(await reply.arrayBuffer()));
  }
  return JSON.parse(live.call(module, name, JSON.stringify(given)));
}

onmessage = async ({ data }) => {
  try {
    postMessage({ id: data.id, answer: await answerTo(data) });
  } catch (error) {
    postMessage({ id: data.id, error: error.message });
  }
};
