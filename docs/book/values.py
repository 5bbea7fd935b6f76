"""The recorded values of a chapter, kept between builds. site.py uses it.

What a chapter shows depends on the references, the vectors and the code that records alone, so it
is kept under their digest, in the user's cache folder. It can be deleted at any time.
"""

import base64
import hashlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from docs.excerpts import ROOT

SOURCES = (
    "reference/**/*.py",
    *(f"docs/book/{name}.py" for name in ("method", "record", "text", "values")),
    "docs/excerpts.py",
)
KEPT = 20  # files; the oldest go


def folder() -> Path:
    """Where values are kept; PALIMPSEST_CACHE names another place."""
    named = os.environ.get("PALIMPSEST_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "palimpsest" / "book"


@cache
def file_of(method: str) -> Path:
    """The file of a chapter's values, named by the digest of all that they depend on."""
    digest = hashlib.sha256(np.__version__.encode())
    for pattern in (*SOURCES, f"docs/vectors/{method}/*"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(f"{path.relative_to(ROOT)}".encode() + path.read_bytes())
    return folder() / f"{method}-{digest.hexdigest()[:16]}.json"


def values_of(method: str) -> str:
    """JSON of a chapter's values, recorded if they are not kept."""
    path = file_of(method)
    if not path.exists():
        from docs.book.method import method_data  # the references, which text does not need

        write_whole(path, as_json(method_data(method)).encode())
        kept = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-KEPT]:
            old.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        part.write(content)
    os.replace(part.name, path)


def as_json(data: object) -> str:
    """JSON for a page. In it no < stands, so that no text can end the script."""
    text = json.dumps(data, separators=(",", ":"), default=encoded)
    return text.replace("<", "\\u003c")


def encoded(value: object) -> dict:
    """What JSON has no form for: an array, whose numbers are float32 in base64, and a call."""
    if not isinstance(value, np.ndarray):
        return vars(value)
    with np.errstate(over="ignore"):  # the lowest float64 becomes -inf
        numbers = value.astype(np.float32)
    data = base64.b64encode(numbers.tobytes()).decode()
    return {"shape": value.shape, "kind": value.dtype.kind, "data": data}
