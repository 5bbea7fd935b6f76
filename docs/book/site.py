"""The pages of the book, and the menu that leads to them. docs/book/__main__.py uses it.

A page is page/page.html, with book.css, its scripts, a text and data inside: it loads nothing.
"""

import errno
import html
import os
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

from docs.book import runtime
from docs.book.search import index_script
from docs.book.text import LIVE, file_text, markdown_of, page_text
from docs.book.values import as_json, values_of
from docs.excerpts import ROOT, definitions, reference_of_pages

PAGE = Path(__file__).parent / "page"
MARK = b"<!-- A page of the book"
# its colours and its helper `make` are ours too
VIEW = ROOT / "accelerated" / "evaluation" / "view.html"
CHAPTERS = [
    path for path, its in reference_of_pages().items() if path == ROOT / "docs" / f"{its.stem}.md"
]
METHODS = [path.stem for path in CHAPTERS]
MENU = {  # {group: patterns of its pages}
    "Begin": [
        "docs/book/front.md",
        "README.md",
        "docs/book/try_one.md",
        "docs/index.md",
        "docs/choosing.md",
        "docs/tour.ipynb",
    ],
    "Chapters": [
        "docs/building_blocks.md",
        *(f"docs/{name}.md" for name in METHODS),
        "docs/book/replay.md",
    ],
    "Exercises": ["docs/practice.md", "docs/break_it.md", "docs/teaching.md"],
    "Results": [
        "docs/claims.md",
        "docs/results/memory.md",
        "docs/results/recall-distance.md",
        "docs/results/[!l]*.md",  # the log is among the rest
    ],
    "Use it": [f"docs/{name}.md" for name in ("training", "evaluation", "library", "speed")],
    "Check it, extend it": ["docs/trust.md", "docs/porting.md", "tests/README.md", "docs/*.md"],
    "Details": ["docs/details/*.md"],
    "Decisions": ["docs/decisions/*.md"],
    "More": ["docs/**/*.md"],
}
NOTHING = "{}"  # data of a page of text
INDEX = "search-index.js"  # what the search box finds
PRACTICE = "docs.practice --in mine"  # pages that say so let a reader write the task there
PYTHON = "python/"  # the folder of what runtime.py brings
NAMES = {"docs/book/front.md": "index.html", "docs/index.md": "methods.html"}


@cache
def menu() -> dict[str, list[Path]]:
    """{group: its pages}; a page that no group names is in the last one whose pattern finds it."""
    groups = {}
    known = set()
    for group, patterns in MENU.items():
        found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        groups[group] = [path for path in dict.fromkeys(found) if path not in known]
        known.update(found)
    return {group: paths for group, paths in groups.items() if paths}


def in_order() -> list[Path]:
    """The pages of the menu, one after another."""
    return [path for paths in menu().values() for path in paths]


def links_of(path: Path) -> Iterator[Path]:
    """The files that a page links to."""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown_of(path)):
        for part in token.children or []:
            file = str(part.attrs.get("href", "")).partition("#")[0]
            if file and ":" not in file:
                yield Path(os.path.normpath(path.parent / file))


@cache
def pages() -> dict[Path, str]:
    """{file of the repository: page of the book}: those of the menu, and files they link to."""
    found = {}
    for path in in_order():
        name = str(path.relative_to(ROOT))
        plain = name.removesuffix(path.suffix).removeprefix("docs/").removeprefix("book/")
        found[path] = NAMES.get(name, f"{plain.replace('/', '_')}.html")
    for path in list(found):
        for file in links_of(path):
            if file not in found and file.exists():
                name = str(file.relative_to(ROOT)).replace("/", "_").replace(".", "_")
                found[file] = f"file_{name}.html"
    return found


def title_of(path: Path) -> str:
    """The title of a page: its first line, or the name of a file."""
    if path.suffix not in (".md", ".ipynb"):
        return str(path.relative_to(ROOT))
    return markdown_of(path).partition("\n")[0].removeprefix("# ")


def short_title(path: Path) -> str:
    """The title of a page in the menu."""
    title = title_of(path).removeprefix("Decisions: ").partition(":")[0]
    return title[0].upper() + title[1:]


def link_to(path: Path, here: Path, words: str) -> str:
    """A link of the menu."""
    is_here = ' aria-current="page"' if path == here else ""
    return f'<a href="{pages()[path]}"{is_here}>{html.escape(words)}</a>'


def menu_html(here: Path) -> str:
    """The groups of pages, each with its links."""
    groups = []
    for group, paths in menu().items():
        links = "".join(link_to(path, here, short_title(path)) for path in paths)
        groups.append(f"<div><h2>{group}</h2>{links}</div>")
    return "".join(groups)


def neighbours_html(here: Path) -> str:
    """Links to the page before and the page after."""
    links = []
    for before, after in pairwise(in_order()):
        if after == here:
            links.append(link_to(before, here, f"← {short_title(before)}"))
        if before == here:
            links.append(link_to(after, here, f"{short_title(after)} →"))
    if not links:
        return ""
    return f'<nav class="neighbours" aria-label="Pages before and after">{"".join(links)}</nav>'


def is_chapter(path: Path) -> bool:
    """Whether a page shows a reference's code beside its text."""
    return path in CHAPTERS


def data_of(path: Path) -> str:
    """JSON of all that a page shows beside its text."""
    data = values_of(path.stem) if is_chapter(path) else NOTHING
    lives = lives_of(path)
    more = {}
    if "try_one" in lives:
        from docs.book.try_one import recorded  # NumPy and two references

        more = {"weights": runtime.weights_offered(), "run": recorded()}
    if "replay" in lives:
        from docs.book.replay import replay_data  # NumPy and a reference

        more = {"replay": replay_data()}
    both = [part for part in (data[1:-1], as_json(more)[1:-1]) if part]
    return f"{{{','.join(both)}}}"


def lives_of(path: Path) -> list[str]:
    """What a reader plays with on a page: names of scripts in page/."""
    if path.suffix != ".md":
        return []
    text = path.read_text(encoding="utf-8")
    marked = ["toys" if name.startswith("toy_") else name for name in LIVE.findall(text)]
    return [*marked, *["practice"] * (PRACTICE in text), *["edit"] * is_chapter(path)]


def addresses_of_functions(path: Path) -> dict[str, str]:
    """{function: address that shows its code}: of a chapter, the page itself."""
    reference = reference_of_pages().get(path)
    if reference is None:
        return {}
    page = "" if is_chapter(path) else f"{reference.stem}.html"
    return {name: f"{page}#{name}" for name in definitions(reference)}


def scripts_for(path: Path, data: str) -> str:
    """The JavaScript of a page, without what it does not need."""
    needed = ["book.js", "search.js"]
    if data != NOTHING:
        needed.append("heat.js")
        needed += ["panel.js"] if is_chapter(path) else []
    lives = lives_of(path)
    if lives:
        needed += ["runtime.js", "controls.js", *(f"{name}.js" for name in lives)]
    make = re.search(r"^function make\(.*?^\}", VIEW.read_text(encoding="utf-8"), re.M | re.S)[0]
    return "\n".join([make, *((PAGE / name).read_text(encoding="utf-8") for name in needed)])


def page_of(path: Path) -> str:
    """A page of the book."""
    data = data_of(path)
    if path.suffix in (".md", ".ipynb"):
        text = page_text(path, pages(), addresses_of_functions(path))
    else:
        text = file_text(path, str(path.relative_to(ROOT)))
    light, dark = re.findall(r":root \{(.*?)\}", VIEW.read_text(encoding="utf-8"), re.S)
    parts = {
        "TITLE": html.escape(title_of(path)),
        "LIGHT": light,
        "DARK": dark,
        "STYLE": (PAGE / "book.css").read_text(encoding="utf-8"),
        "KIND": "method" if is_chapter(path) else "text",
        "MENU": menu_html(path),
        "CONTENTS": text.contents,
        "TEXT": text.article + neighbours_html(path),
        "DATA": data,
        "SCRIPT": scripts_for(path, data),
    }
    blank = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], blank)


def build(out: Path) -> dict[str, int]:
    """Write all pages; returns {page: bytes}.

    Raises OSError if something else than a page of the book has the name of one.
    """
    out.mkdir(parents=True, exist_ok=True)
    for page in map(out.joinpath, pages().values()):
        held = page.read_bytes() if page.exists() else MARK
        if held and MARK not in held:  # a write that was stopped may have left an empty one
            raise OSError(errno.EEXIST, f"{page.name} is there and is no page of the book")
    (out / INDEX).write_text(index_script(pages()), encoding="utf-8")
    for name in runtime.names():
        (out / PYTHON).mkdir(exist_ok=True)
        (out / PYTHON / name).write_bytes(runtime.content_of(name))
    sizes = {}
    for path, page in pages().items():
        sizes[page] = (out / page).write_bytes(page_of(path).encode())
    return sizes
