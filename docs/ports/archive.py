"""python -m docs.ports.archive FILE.zip [--float32]: the vectors in one file, for another's CI.

In it stand the folders of docs/vectors, their manifest and hints, reference/check.py and the
licence. With --float32 all numbers are in float32, for frameworks without float64. `--manifest`
instead of FILE writes docs/vectors/manifest.json anew. Needs NumPy.
"""

import argparse
import hashlib
import io
import json
import sys
import tempfile
import zipfile
from pathlib import Path

from reference.check import GIVEN, STAGES, VERSION, CheckError, exit_code, load
from reference.vectors import TYPES, write, write_whole

ROOT = Path(__file__).parents[2]
SINGLE = TYPES | {"f": ("F32", "<f4")}  # for frameworks without float64
VECTORS = ROOT / "docs" / "vectors"
MANIFEST = "manifest.json"
ABOUT = {
    "version": VERSION,
    "licence": "MIT, see LICENSE",
    "levels": [*STAGES],
    "promise": "A new version may add cases and tensors, and mend one that was wrong, which "
    "docs/ports/ci.md then says. A tensor's name, shape and meaning stay. A port that has a level "
    "keeps it unless a mended tensor takes it away.",
}


def manifest(folder: Path) -> dict:
    """What stands in a folder of vectors, file by file, and what each case is for."""
    files = {}
    values: dict = {}  # of each paper's fields, in all its cases
    for path in sorted(folder.glob("*/*.safetensors")):
        rows, metadata = load(path)
        content = path.read_bytes()
        config = json.loads(metadata["config"])
        for field, value in config.items():
            values.setdefault((path.parent.name, field), []).append(value)
        files[path.relative_to(folder).as_posix()] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "given": sum(name.startswith(GIVEN) for name in rows),
            "asked for": sum(not name.startswith(GIVEN) for name in rows),
            "config": config,
        }
    for name, each in files.items():
        paper = name.partition("/")[0]
        each["for"] = {
            field: value
            for field, value in each["config"].items()
            if 2 * values[paper, field].count(value) < len(values[paper, field])
        }
    return ABOUT | {"files": files}


def as_text(about: dict) -> str:
    """A manifest, a line for each file."""
    lines = [f" {json.dumps(name)}: {json.dumps(each)}" for name, each in about["files"].items()]
    head = json.dumps(about | {"files": {}}, indent=1).removesuffix("{}\n}")
    return f"{head}{{\n" + ",\n".join(lines) + "\n}}\n"


def write_archive(file: Path, single: bool) -> None:
    """Write FILE.zip; nothing is overwritten."""
    if file.exists() or file.is_symlink():
        raise CheckError(f"{file} is there, and nothing is overwritten; give another name")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in sorted(VECTORS.glob("*/*.safetensors")):
            rows, _ = load(path)
            about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            to = copy / path.relative_to(VECTORS)
            to.parent.mkdir(exist_ok=True)
            write(to, rows, about, SINGLE if single else TYPES)
        (copy / MANIFEST).write_text(as_text(manifest(copy)), encoding="utf-8")
        beside = [VECTORS / "rules.json", VECTORS / "hints.json", ROOT / "LICENSE"]
        for path in [*beside, ROOT / "reference" / "check.py"]:
            (copy / path.name).write_bytes(path.read_bytes())
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
            for path in [*sorted(copy.rglob("*.*")), copy / "LICENSE"]:
                packed.write(path, path.relative_to(copy))
        write_whole(file, content.getvalue())


def main(argv: list | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m docs.ports.archive", description=__doc__)
    parser.add_argument("file", metavar="FILE.zip", type=Path, nargs="?", help="a new file")
    parser.add_argument("--float32", action="store_true", help="write float32 for float64")
    parser.add_argument("--manifest", action="store_true", help="write the manifest anew")
    options = parser.parse_args(argv)
    if not options.manifest and not options.file:
        parser.error("give FILE.zip or --manifest")

    def work() -> bool:
        if options.manifest:
            write_whole(VECTORS / MANIFEST, as_text(manifest(VECTORS)).encode())
        else:
            write_archive(options.file, options.float32)
            print(f"{options.file}: vectors {VERSION}, {options.file.stat().st_size:,} bytes")
        return True

    return exit_code("docs.ports.archive", work)


if __name__ == "__main__":
    sys.exit(main())
