"""Write the excerpts of the references into the chapters: python -m docs.excerpts.

It also writes the repository's address, which stands in pyproject.toml, into the notebook.

A chapter marks a place with <!-- excerpt: NAME, NAME --> and the code block after it is the source
of these functions and classes of its reference or of the reference's variants, with the comments
right above them. NAME:3-9 is their lines 3 to 9, where def is line 1. The page of building blocks
shows parts of compressive.
"""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour.ipynb"
OWNER = "OWNER"  # in the address, until whoever publishes the project sets it
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
EXCERPT = re.compile(r"^<!-- excerpt: ([^\n]+) -->\n(?:```python\n.*?^```\n)?", re.M | re.S)


class Lines(NamedTuple):
    """Where a function or class stands; lines from 0."""

    file: Path
    first: int  # with the comments above it
    start: int  # of def or of its first decorator
    stop: int  # after its last line


def files_of(reference: Path) -> list[Path]:
    """A reference's file, and that of its variants if there is one."""
    variants = reference.parent / "variants" / reference.name
    return [reference, variants] if variants.exists() else [reference]


@cache
def definitions(reference: Path) -> dict[str, Lines]:
    """{name: its Lines} of the functions and classes of a reference and of its variants.

    Of two of one name it is the reference's.
    """
    found = {}
    for file in reversed(files_of(reference)):
        found |= definitions_in(file)
    return found


def definitions_in(file: Path) -> dict[str, Lines]:
    """{name: its Lines} of the functions and classes of a file."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        decorators = [part.lineno for part in node.decorator_list]
        start = min([node.lineno, *decorators]) - 1
        first = start
        while lines[first - 1].startswith("# ") and not lines[first - 1].startswith("# ---"):
            first -= 1
        if lines[first - 1].startswith("# ---"):  # then a section's title is right above
            first += 1
        found[node.name] = Lines(file, first, start, node.end_lineno)
    return found


def excerpt(reference: Path, name: str) -> str:
    """The source of NAME, or of NAME:FIRST-LAST; raises KeyError if there is no such name."""
    name, _, span = name.partition(":")
    file, first, start, stop = definitions(reference)[name]
    if span:
        low, high = map(int, span.split("-"))
        first, stop = start + low - 1, min(start + high, stop)
    return "\n".join(file.read_text(encoding="utf-8").splitlines()[first:stop]) + "\n"


def with_excerpts(page: str, reference: Path) -> str:
    """The page, with the code block after each of its markers written anew."""

    def block(marker: re.Match) -> str:
        names = marker[1].split(",")
        code = "\n".join(excerpt(reference, name.strip()) for name in names)
        return f"<!-- excerpt: {marker[1]} -->\n```python\n{code}```\n"

    return EXCERPT.sub(block, page)


def reference_of_pages() -> dict[Path, Path]:
    """{page: reference that it shows}: chapters, their details, the page of building blocks."""
    docs = ROOT / "docs"
    found = {docs / "building_blocks.md": ROOT / "reference" / "compressive.py"}
    for page in [*sorted(docs.glob("*.md")), *sorted(docs.glob("details/*.md"))]:
        reference = ROOT / "reference" / f"{page.stem}.py"
        if reference.exists():
            found[page] = reference
    return found


def address() -> str:
    """The repository's address, or nothing if it is not set yet."""
    about = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [found] = re.findall(r'^Repository = "(.*)"', about, re.M)
    return "" if OWNER in found else found


def with_address(tour: str, of: str) -> str:
    """The notebook with the address `of` its clone and a badge that opens it in Colab, if any."""
    notebook = json.loads(tour)
    first, *others = notebook["cells"]
    lines = [line for line in first["source"] if BADGE not in line]
    if of:
        place = of.replace("https://github.com", "https://colab.research.google.com/github")
        lines.insert(1, f"\n[![Open in Colab]({BADGE})]({place}/blob/main/docs/tour.ipynb)\n")
    first["source"] = lines
    for cell in others:
        cell["source"] = [
            re.sub('^CLONE = ".*?"', f'CLONE = "{of}"', line) for line in cell["source"]
        ]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    tour = with_address(TOUR.read_text(encoding="utf-8"), address())
    TOUR.write_text(tour, encoding="utf-8")
    for its_page, its_reference in reference_of_pages().items():
        written = with_excerpts(its_page.read_text(encoding="utf-8"), its_reference)
        its_page.write_text(written, encoding="utf-8")
