"""Write the excerpts of the references into the chapters: python -m docs.excerpts.

A chapter marks a place with <!-- excerpt: NAME, NAME --> and the code block after it is the source of these functions and
classes of its reference, with the comments right above them. NAME:3-9 is their lines 3 to 9, where def is line 1.
"""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXCERPT = re.compile(r"^<!-- excerpt: ([^\n]+) -->\n(?:```python\n.*?^```\n)?", re.M | re.S)


@cache
def definitions(reference: Path) -> dict:
    """{name: (first line with the comments above it, line of def or of its first decorator, last line)}, lines from 0."""
    text = reference.read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            start = min([node.lineno, *(part.lineno for part in node.decorator_list)]) - 1
            first = start
            while lines[first - 1].startswith("# ") and not lines[first - 1].startswith("# ---"):
                first -= 1
            found[node.name] = (first, start, node.end_lineno)
    return found


def excerpt(reference: Path, name: str) -> str:
    """The source of NAME, or of NAME:FIRST-LAST; raises KeyError if the reference has no such name."""
    name, _, span = name.partition(":")
    first, start, stop = definitions(reference)[name]
    if span:
        low, high = map(int, span.split("-"))
        first, stop = start + low - 1, min(start + high, stop)
    return "\n".join(reference.read_text().splitlines()[first:stop]) + "\n"


def with_excerpts(page: str, reference: Path) -> str:
    """The page, with the code block after each of its markers written anew."""

    def block(match):
        code = "\n".join(excerpt(reference, name.strip()) for name in match[1].split(","))
        return f"<!-- excerpt: {match[1]} -->\n```python\n{code}```\n"

    return EXCERPT.sub(block, page)


def chapters() -> dict:
    """{chapter: its reference} of all models."""
    pages = {
        path: ROOT / "reference" / path.name.replace(".md", ".py")
        for path in sorted((ROOT / "docs").glob("*.md"))
    }
    return {page: reference for page, reference in pages.items() if reference.exists()}


if __name__ == "__main__":
    for chapter, its_reference in chapters().items():
        chapter.write_text(with_excerpts(chapter.read_text(), its_reference))
