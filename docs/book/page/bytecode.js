// Run by Node, not by a page: Python compiles its library and NumPy once, so that no reader's browser has to (runtime.py).
// node bytecode.js FOLDER FILE ...: of each archive in FOLDER a copy with bytecode in the place of source, in its bytecode/.

const fs = require("node:fs");
const path = require("node:path");

const COMPILE = `
import compileall, pathlib, py_compile, shutil

never_checked = py_compile.PycInvalidationMode.UNCHECKED_HASH
shutil.unpack_archive("/given.zip", "/given")
compileall.compile_dir("/given", quiet=2, legacy=True, stripdir="/given", invalidation_mode=never_checked)
for file in pathlib.Path("/given").rglob("*.*"):
    if file.suffix in (".pyi", ".pxd", ".h", ".c", ".a") or file.match("*.py") and file.with_suffix(".pyc").exists():
        file.unlink()
shutil.make_archive("/compiled", "zip", "/given")
shutil.rmtree("/given")
`;

async function compile(folder, files) {
  const { loadPyodide } = await import(path.join(folder, "pyodide.mjs"));
  const python = await loadPyodide({ indexURL: folder });
  fs.mkdirSync(path.join(folder, "bytecode"), { recursive: true });
  for (const file of files) {
    python.FS.writeFile("/given.zip", new Uint8Array(fs.readFileSync(path.join(folder, file))));
    python.runPython(COMPILE);
    const part = path.join(folder, "bytecode", `${file}.part`);
    fs.writeFileSync(part, python.FS.readFile("/compiled.zip"));
    fs.renameSync(part, part.replace(/\.part$/, ""));
  }
}

const [folder, ...files] = process.argv.slice(2);
compile(folder, files);
