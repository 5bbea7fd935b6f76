"""Chapters as HTML: formulas as MathML, code coloured, functions and variables as places to go to. For docs.book."""

import base64
import html
import mimetypes
import os
import re
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String

from docs.book.record import Function
from docs.excerpts import EXCERPT

DOCS = Path(__file__).parents[1]
INLINE_MATH = re.compile(r"\$`(.+?)`\$", re.S)
CLASSES = {Comment: "c", Keyword: "k", String: "s", Number: "m", Name.Function: "n", Name.Class: "n"}


def coloured(kind: object, text: str) -> str:
    """A token of Python as HTML."""
    name = next((name for of, name in CLASSES.items() if kind in of), None)
    return f'<i class="{name}">{html.escape(text)}</i>' if name else html.escape(text)


def code_html(source: str, function: Function | None = None, functions: tuple = ()) -> str:
    """Python as HTML: variables at a function's places are spans with the place's number, names of functions are links."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    places = {(place.line, place.column): number for number, place in enumerate(function.places)} if function else {}
    line, column, out = function.first if function else 1, 0, []
    for kind, text in lexer.get_tokens(source):
        number = places.get((line, column))
        if number is not None:
            out.append(f'<span class="v" tabindex="-1" data-place="{number}">{coloured(kind, text)}</span>')
        elif kind in Name and kind not in Name.Function and text in functions:
            out.append(f'<a class="f" href="#{text}">{text}</a>')
        else:
            out.append(coloured(kind, text))
        line, column = line + text.count("\n"), len(text.rpartition("\n")[2]) + (0 if "\n" in text else column)
    return "".join(out)


def mathml(formula: str, display: str) -> str:
    """A formula as MathML; for a screen reader and for copying it keeps its LaTeX. latex2mathml knows aligned as align*."""
    known = formula.strip().replace("{aligned}", "{align*}")
    return convert(known, display=display).replace("<math ", f'<math aria-label="{html.escape(formula.strip())}" ', 1)


def inline_math(state: object, silent: bool) -> bool:
    """The rule of $`formula`$."""
    match = INLINE_MATH.match(state.src, state.pos)
    if match and not silent:
        state.push("inline_math", "", 0).content = match[1]
    if match:
        state.pos = match.end()
    return bool(match)


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def picture(path: Path) -> str:
    """A picture as an address that holds it."""
    return f"data:{mimetypes.guess_type(path)[0]};base64,{base64.b64encode(path.read_bytes()).decode()}"


class Chapter:
    """Turns a page of docs/ into HTML; `pages` is {page of docs/: page of the book}, `functions` the names that are links."""

    def __init__(self, path: Path, pages: dict[Path, str], functions: tuple = ()):
        self.path, self.pages, self.functions = path, pages, functions
        self.markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
        self.markdown.inline.ruler.before("backticks", "math", inline_math)
        for kind in ("inline_math", "fence", "code_inline", "image", "heading_open", "link_open", "link_close", "html_block"):
            self.markdown.renderer.rules[kind] = getattr(self, kind)

    def html(self) -> str:
        """The whole page."""
        return self.markdown.render(self.path.read_text())

    def inline_math(self, tokens, at, options, env) -> str:
        return mathml(tokens[at].content, "inline")

    def fence(self, tokens, at, options, env) -> str:
        token = tokens[at]
        if token.info == "math":
            return f'<div class="formula">{mathml(token.content, "block")}</div>'
        code = code_html(token.content, functions=self.functions) if token.info == "python" else html.escape(token.content)
        names = at and EXCERPT.match(tokens[at - 1].content)
        if not names:
            return f"<pre>{code}</pre>"
        links = " · ".join(self.link_to(name.strip().partition(":")[0]) for name in names[1].split(","))
        return f'<details class="excerpt"><summary>{links}</summary><pre>{code}</pre></details>'

    def code_inline(self, tokens, at, options, env) -> str:
        text = tokens[at].content
        return self.link_to(text) if text in self.functions else f"<code>{html.escape(text)}</code>"

    def link_to(self, function: str) -> str:
        """A link that shows a function in the panel."""
        return f'<a class="f" href="#{function}"><code>{function}</code></a>'

    def html_block(self, tokens, at, options, env) -> str:
        return "" if tokens[at].content.startswith("<!--") else tokens[at].content

    def image(self, tokens, at, options, env) -> str:
        source = picture(self.path.parent / tokens[at].attrs["src"])
        return f'<img src="{source}" alt="{html.escape(tokens[at].content)}">'

    def heading_open(self, tokens, at, options, env) -> str:
        return f'<{tokens[at].tag} id="{slug(tokens[at + 1].content)}">'

    def page_of(self, address: str) -> str | None:
        """Where a link leads from the book, or None: to a file that the book does not have."""
        file, _, anchor = address.partition("#")
        if "://" in address or not file:
            return address
        target = Path(os.path.normpath(self.path.parent / file))
        return None if target not in self.pages else self.pages[target] + (f"#{anchor}" if anchor else "")

    def link_open(self, tokens, at, options, env) -> str:
        address = tokens[at].attrs["href"]
        target = self.page_of(address)
        env.setdefault("open", []).append("a" if target else "span")
        return f'<a href="{html.escape(target)}">' if target else f'<span class="file" title="{html.escape(address)}">'

    def link_close(self, tokens, at, options, env) -> str:
        return f"</{env['open'].pop()}>"
