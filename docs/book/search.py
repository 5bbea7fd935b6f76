"""What the book's search box finds: titles, headings, functions and terms. site.py uses it.

The index is a script of its own, search-index.js. A page loads it when the box is first used, from
a server or from a file alike.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from docs.book.text import anchor_of, markdown_of
from docs.excerpts import ROOT, definitions, reference_of_pages

GLOSSARY = ROOT / "docs" / "index.md"
CODE = re.compile(r"^```.*?^```$|^~~~.*?^~~~$", re.M | re.S)
HEADING = re.compile(r"^#{1,3} (.+?)\s*$", re.M)
TERM = re.compile(r"^\| ([\w -]+) \| (.+?) \|$", re.M)  # a row of the glossary: a word, its meaning
MARKS = re.compile(r"\[([^\]]*)\]\([^)]*\)|[`*$]")  # links and signs that are not shown


def plain(markdown: str) -> str:
    """The words of a line of Markdown."""
    return MARKS.sub(lambda match: match[1] or "", markdown)


def headings_of(path: Path) -> Iterator[tuple[str, str]]:
    """(words, anchor) of each heading of a page, its title first."""
    before: Counter = Counter()
    for heading in HEADING.findall(CODE.sub("", markdown_of(path))):
        anchor = anchor_of(heading, before)
        yield plain(heading), anchor


def entries(pages: dict[Path, str]) -> list[tuple[str, str, str]]:
    """[(what is found, where it stands, its address)] of the book's pages {path: page}."""
    found = []
    for path, page in pages.items():
        if path.suffix != ".md":
            continue
        title, *sections = headings_of(path)
        found.append((title[0], "", page))
        found += [(words, title[0], f"{page}#{anchor}") for words, anchor in sections]
        reference = reference_of_pages().get(path)
        if reference is not None and path == ROOT / "docs" / f"{reference.stem}.md":
            name = str(reference.relative_to(ROOT))
            found += [(function, name, f"{page}#{function}") for function in definitions(reference)]
    _, _, glossary = markdown_of(GLOSSARY).partition("## Glossary")
    for term, meaning in TERM.findall(glossary):
        if term != "word":
            found.append((term, plain(meaning), f"{pages[GLOSSARY]}#glossary"))
    return found


def index_script(pages: dict[Path, str]) -> str:
    """The script that gives the search box its entries."""
    shown = json.dumps(entries(pages), ensure_ascii=False, separators=(",", ":"))
    return f"window.searchEntries = {shown};\n"
