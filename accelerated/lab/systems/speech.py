"""Speech to learn from (Compressive Transformers, 5.6): docstrings of the standard library, read aloud by espeak-ng."""

import ast
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from accelerated.program.errors import InputError
from accelerated.program.files import disk_errors, written_whole
from accelerated.program.progress import Progress

PROGRAM = "espeak-ng"
SPOKEN = 400  # characters of a docstring that are read, about 25 seconds
RECORDINGS = 60
ADVICE = "give another folder"


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of each module below a folder whose docstring is long enough, in the order of their names."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}.isdisjoint(parts):
            text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
            if len(text) >= SPOKEN:
                yield "-".join(parts), text[:SPOKEN]


def read_aloud(folder: Path) -> None:
    """Write RECORDINGS recordings of speech, 22,050 samples a second, into a folder; those that are there stay.

    Raises InputError if espeak-ng is not installed, or fails.
    """
    chosen = list(docstrings(Path(sysconfig.get_paths()["stdlib"])))[:RECORDINGS]
    missing = [(path, text) for name, text in chosen if not (path := folder / f"{name}.wav").exists()]
    if not missing:
        return
    if not shutil.which(PROGRAM):
        raise InputError(f"{PROGRAM} reads the speech of this table aloud, and it is not installed; see apt install {PROGRAM}")
    with disk_errors(folder, ADVICE), Progress("reading aloud", len(missing)) as bar:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in missing:
            with written_whole(path, ADVICE) as temporary:
                command = [PROGRAM, "-v", "en-us", "-w", temporary, "--stdin"]
                done = subprocess.run(command, input=text, text=True, stderr=subprocess.PIPE)
                if done.returncode:
                    said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
                    raise InputError(f"{PROGRAM} could not read {path.stem} aloud: {said}; see {PROGRAM} --voices")
            bar.update()
