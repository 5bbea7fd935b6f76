// Python in a worker of its own, so that a page stays alive and can end it; runtime.js speaks with it.
// A message {id, module, name, given, wheels} is answered by {id, answer} or {id, error}; meanwhile by {id, isAlive}.

import { loadPyodide } from "./pyodide.mjs";

const here = name => new URL(name, import.meta.url).href;

async function start() {
  const ours = fetch(here("palimpsest.zip")).then(reply => reply.arrayBuffer());
  const python = await loadPyodide({ indexURL: here("./"), packages: ["numpy"] });
  python.unpackArchive(await ours, "zip", { extractDir: "/book" });
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
