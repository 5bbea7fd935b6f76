"""Chapters as HTML: formulas as MathML, code coloured, functions and variables as places to go to. For docs.book."""

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
    """Python from line `first` as HTML: variables have the number of their place, names of functions are links."""
    numbers = {(place.line, place.column): number for number, place in enumerate(places)}
    line, column, out = first, 0, []
    for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        name = next((name for of, name in CLASSES.items() if kind in of), None)
        shown = f"<i class={name}>{html.escape(text)}</i>" if name else html.escape(text)
        if (line, column) in numbers:
            shown = f"<var data-place={numbers[line, column]}>{shown}</var>"
        elif kind in Name and kind not in Name.Function and text in functions:
            shown = f'<a class="f" href="#{text}">{text}</a>'
        out.append(shown)
        line, column = (
            line + text.count("\n"),
            len(text.rpartition("\n")[2]) + (0 if "\n" in text else column),
        )
    return "".join(out)


def mathml(formula: str, display: str) -> str:
    """A formula as MathML; for a screen reader and for copying it keeps its LaTeX. latex2mathml knows aligned as align*."""
    known = formula.strip().replace("{aligned}", "{align*}")
    return convert(known, display=display).replace(
        "<math ", f'<math aria-label="{html.escape(formula.strip())}" ', 1
    )


def inline_math(state: object, silent: bool) -> bool:
    """The rule of $`formula`$."""
    match = INLINE_MATH.match(state.src, state.pos)
    if match:
        state.pos = match.end()
        if not silent:
            state.push("inline_math", "", 0).content = match[1]
    return bool(match)


def link_to(function: str) -> str:
    """A link that shows a function in the panel."""
    return f'<a class="f" href="#{function}"><code>{function}</code></a>'


class Chapter(RendererHTML):
    """Renders a page of docs/, kind by kind of its parts; what it needs to know of the page is in `env`: see `chapter_html`."""

    def inline_math(self, tokens, at, options, env) -> str:
        return mathml(tokens[at].content, "inline")

    def fence(self, tokens, at, options, env) -> str:
        kind, content = tokens[at].info, tokens[at].content
        if kind == "math":
            return f'<div class="formula">{mathml(content, "block")}</div>'
        code = f"<pre>{code_html(content, env['functions']) if kind == 'python' else html.escape(content)}</pre>"
        names = at and EXCERPT.match(tokens[at - 1].content)
        if not names:
            return code
        links = " · ".join(link_to(name.strip().partition(":")[0]) for name in names[1].split(","))
        return f'<details class="excerpt"><summary>{links}</summary>{code}</details>'

    def code_inline(self, tokens, at, options, env) -> str:
        text = tokens[at].content
        return link_to(text) if text in env["functions"] else f"<code>{html.escape(text)}</code>"

    def image(self, tokens, at, options, env) -> str:
        """A picture, whose address holds it."""
        path = env["path"].parent / tokens[at].attrs["src"]
        source = f"data:{mimetypes.guess_type(path)[0]};base64,{base64.b64encode(path.read_bytes()).decode()}"
        return f'<img src="{source}" alt="{html.escape(tokens[at].content)}">'

    def heading_open(self, tokens, at, options, env) -> str:
        """A heading, with the anchor that GitHub gives it."""
        anchor = re.sub(r"[^\w\- ]", "", tokens[at + 1].content.lower()).replace(" ", "-")
        return f'<{tokens[at].tag} id="{anchor}">'

    def link_open(self, tokens, at, options, env) -> str:
        """A link; to a file that the book does not have it leads nowhere, and says the file's name."""
        address = tokens[at].attrs["href"]
        file, sign, anchor = address.partition("#")
        if file and "://" not in address:
            page = env["pages"].get(Path(os.path.normpath(env["path"].parent / file)))
            if page is None:
                return f'<a class="file" title="{html.escape(address)}">'
            address = page + sign + anchor
        return f'<a href="{html.escape(address)}">'


def chapter_html(path: Path, pages: dict[Path, str], functions: Iterable[str] = ()) -> str:
    """A page of docs/ as HTML; `pages` is {page of docs/: page of the book}, `functions` the names that are links."""
    markdown = MarkdownIt("commonmark", renderer_cls=Chapter).enable("table")
    markdown.inline.ruler.before("backticks", "math", inline_math)
    return markdown.render(path.read_text(), {"path": path, "pages": pages, "functions": functions})
