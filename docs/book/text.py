"""Chapters as HTML: formulas as MathML, code coloured, functions and variables as places to go to.

docs/book/__main__.py uses it.
"""

import base64
import html
import mimetypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String

from docs.book.record import Place
from docs.excerpts import EXCERPT

INLINE_MATH = re.compile(r"\$`(.+?)`\$", re.S)
CLASSES = {
    Comment: "c",
    Keyword: "k",
    String: "s",
    Number: "s",
    Name.Function: "n",
    Name.Class: "n",
}


def code_html(
    source: str, functions: Iterable[str] = (), first: int = 1, places: Iterable[Place] = ()
) -> str:
    """Python from line `first` as HTML.

    Variables have the number of their place, names of functions are links.
    """
    numbers = {(place.line, place.column): number for number, place in enumerate(places)}
    line = first
    column = 0
    out = []
    for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        shown = coloured(kind, text)
        is_name = kind in Name and kind not in Name.Function
        if (line, column) in numbers:
            shown = f"<var data-place={numbers[line, column]}>{shown}</var>"
        elif is_name and text in functions:
            shown = f'<a class="f" href="#{text}">{text}</a>'
        out.append(shown)

        _, ends, last = text.rpartition("\n")
        if ends:
            line += text.count("\n")
            column = 0
        column += len(last)
    return "".join(out)


def coloured(kind: tuple, text: str) -> str:
    """A piece of code as HTML, in the class of its kind."""
    text = html.escape(text)
    for of, name in CLASSES.items():
        if kind in of:
            return f"<i class={name}>{text}</i>"
    return text


def mathml(formula: str, display: str) -> str:
    """A formula as MathML; for a screen reader and for copying it keeps its LaTeX."""
    formula = formula.strip()
    known = formula.replace("{aligned}", "{align*}")  # as latex2mathml knows it
    labelled = f'<math aria-label="{html.escape(formula)}" '
    return convert(known, display=display).replace("<math ", labelled, 1)


def inline_math(state: object, silent: bool) -> bool:
    """The rule of $`formula`$."""
    match = INLINE_MATH.match(state.src, state.pos)
    if match is None:
        return False
    state.pos = match.end()
    if not silent:
        state.push("inline_math", "", 0).content = match[1]
    return True


def link_to(function: str) -> str:
    """A link that shows a function in the panel."""
    return f'<a class="f" href="#{function}"><code>{function}</code></a>'


class Chapter(RendererHTML):
    """Renders a page of docs/, kind by kind of its parts.

    What it needs to know of the page is in `env`: see `chapter_html`.
    """

    def inline_math(self, tokens, at, options, env) -> str:
        return mathml(tokens[at].content, "inline")

    def fence(self, tokens, at, options, env) -> str:
        """A block: a formula, or code; the code of an excerpt is folded, with links to it."""
        kind = tokens[at].info
        content = tokens[at].content
        if kind == "math":
            return f'<div class="formula">{mathml(content, "block")}</div>'
        if kind == "python":
            code = f"<pre>{code_html(content, env['functions'])}</pre>"
        else:
            code = f"<pre>{html.escape(content)}</pre>"
        marker = EXCERPT.match(tokens[at - 1].content) if at else None
        if marker is None:
            return code
        names = [name.strip().partition(":")[0] for name in marker[1].split(",")]
        links = " · ".join(map(link_to, names))
        return f'<details class="excerpt"><summary>{links}</summary>{code}</details>'

    def code_inline(self, tokens, at, options, env) -> str:
        text = tokens[at].content
        return link_to(text) if text in env["functions"] else f"<code>{html.escape(text)}</code>"

    def image(self, tokens, at, options, env) -> str:
        """A picture, whose address holds it."""
        path = env["path"].parent / tokens[at].attrs["src"]
        kind, _ = mimetypes.guess_type(path)
        picture = base64.b64encode(path.read_bytes()).decode()
        about = html.escape(tokens[at].content)
        return f'<img src="data:{kind};base64,{picture}" alt="{about}">'

    def heading_open(self, tokens, at, options, env) -> str:
        """A heading, with the anchor that GitHub gives it."""
        words = re.sub(r"[^\w\- ]", "", tokens[at + 1].content.lower())
        return f'<{tokens[at].tag} id="{words.replace(" ", "-")}">'

    def link_open(self, tokens, at, options, env) -> str:
        """A link; to a file that the book lacks it leads nowhere, and says the file's name."""
        address = tokens[at].attrs["href"]
        file, sign, anchor = address.partition("#")
        if file and "://" not in address:
            page = env["pages"].get(Path(os.path.normpath(env["path"].parent / file)))
            if page is None:
                return f'<a class="file" title="{html.escape(address)}">'
            address = page + sign + anchor
        return f'<a href="{html.escape(address)}">'


def chapter_html(path: Path, pages: dict[Path, str], functions: Iterable[str] = ()) -> str:
    """A page of docs/ as HTML.

    `pages` is {page of docs/: page of the book}, `functions` the names that are links.
    """
    markdown = MarkdownIt("commonmark", renderer_cls=Chapter).enable("table")
    markdown.inline.ruler.before("backticks", "math", inline_math)
    return markdown.render(path.read_text(), {"path": path, "pages": pages, "functions": functions})
