"""Pages of docs/ as HTML: coloured code, functions and variables as places to go to, anchors.

docs/book/site.py uses it.
"""

import base64
import html
import json
import mimetypes
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from pygments.lexer import Lexer
from pygments.lexers import PythonLexer, TextLexer, find_lexer_class_for_filename
from pygments.token import Comment, Keyword, Name, Number, String

from docs.book.formula import Symbols, display_formula, inline_formula
from docs.book.record import Place
from docs.excerpts import EXCERPT

INLINE_MATH = re.compile(r"\$`(.+?)`\$", re.S)
OPTION = re.compile(r"(?<![^\s(\[=])--?[A-Za-z][\w-]*")  # it is not broken at its signs
PANEL = re.compile(r"<!-- panel: (\w+) -->")
CARDS = "<!-- cards -->"
# The white paper of a drawing
PAPER = re.compile(r'(<g id="patch_[12]">\s*<path d="[^"]*"\s*style="fill: )#ffffff')
LIVE = re.compile(r"^<!-- live: (\w+) -->$", re.M)  # where what a reader plays with is shown
CLASSES = {
    Comment: "c",
    Keyword: "k",
    String: "s",
    Number: "s",
    Name.Function: "n",
    Name.Class: "n",
}


class Text(NamedTuple):
    """A page's text as HTML, and the table of its contents."""

    article: str
    contents: str


def lines_html(shown: str) -> str:
    """Code as HTML whose every line is an element, which is indented on when it wraps."""
    lines = []
    for line in shown.split("\n"):
        plain = re.sub(r"<[^>]*>", "", line)
        indent = len(plain) - len(plain.lstrip())
        style = f' style="--indent:{indent}"' if indent else ""
        lines.append(f'<span class="line"{style}>{line}\n</span>')
    return "".join(lines)


def code_html(
    source: str,
    functions: dict[str, str] | None = None,
    first: int = 1,
    places: Iterable[Place] = (),
    lexer: type[Lexer] = PythonLexer,
) -> str:
    """Code from line `first` as HTML.

    Variables have the number of their place, names of `functions` are links to their addresses.
    """
    functions = functions or {}
    numbers = {(place.line, place.column): number for number, place in enumerate(places)}
    line = first
    column = 0
    out = []
    pieces = lexer(stripnl=False, ensurenl=False).get_tokens(source.rstrip("\n"))
    for kind, text in pieces:
        shown = coloured(kind, text)
        is_name = kind in Name and kind not in Name.Function
        if (line, column) in numbers:
            shown = f"<var data-place={numbers[line, column]}>{shown}</var>"
        elif is_name and text in functions:
            shown = f'<a class="f" href="{functions[text]}">{text}</a>'
        out.append(shown)

        _, ends, last = text.rpartition("\n")
        if ends:
            line += text.count("\n")
            column = 0
        column += len(last)
    return lines_html("".join(out))


def coloured(kind: tuple, text: str) -> str:
    """A piece of code as HTML, each of its lines in the class of its kind."""
    text = html.escape(text, quote=False)
    for of, name in CLASSES.items():
        if kind in of:
            return "\n".join(f"<i class={name}>{line}</i>" for line in text.split("\n"))
    return text


def anchor_of(heading: str, before: Counter) -> str:
    """The anchor that GitHub gives a heading; `before` counts those of the page so far."""
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    before[anchor] += 1
    return anchor if before[anchor] == 1 else f"{anchor}-{before[anchor] - 1}"


def inline_math(state: object, silent: bool) -> bool:
    """The rule of $`formula`$."""
    match = INLINE_MATH.match(state.src, state.pos)
    if match is None:
        return False
    state.pos = match.end()
    if not silent:
        state.push("inline_math", "", 0).content = match[1]
    return True


def rows_of(tokens: list[Token]) -> list[list[Token]]:
    """The rows of the first table among tokens, each as the inline tokens of its cells."""
    rows = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        if token.type == "inline" and rows:
            rows[-1].append(token)
        if token.type == "table_close":
            break
    return rows


def symbols_of(tokens: list[Token]) -> Symbols:
    """The symbols of a chapter's section Symbols: formulas, letters and code of its table."""
    symbols = Symbols()
    titles = [at for at, token in enumerate(tokens) if token.content == "Symbols"]
    if not titles:
        return symbols
    head, *body = rows_of(tokens[titles[0] :])
    columns = [0]
    columns += [at for at, cell in enumerate(head) if at and "code" in cell.content]
    for row, cells in enumerate(body):
        for column in columns:
            for part in cells[column].children:
                if part.type == "inline_math":
                    symbols.add(part.content, row)
                elif part.type == "code_inline":
                    symbols.names.setdefault(part.content, row)
                elif column == 0 and part.type == "text":
                    letters = re.findall(r"\b[A-Z]\b", part.content)
                    symbols.add(",".join(letters), row)
    return symbols


class Page(RendererHTML):
    """Renders a page of docs/, kind by kind of its parts.

    What it needs to know of the page is in `env`: see `page_text`.
    """

    def inline_math(self, tokens, at, options, env) -> str:
        return inline_formula(tokens[at].content, env["symbols"])

    def fence(self, tokens, at, options, env) -> str:
        """A block: a formula, or code; the code of an excerpt is folded, with links to it."""
        kind = tokens[at].info
        content = tokens[at].content
        if kind == "math":
            return display_formula(content, env["symbols"])
        if kind == "python":
            code = code_html(content, env["functions"])
        else:
            code = lines_html(html.escape(content.rstrip("\n"), quote=False))
        marker = EXCERPT.match(tokens[at - 1].content) if at else None
        if marker is None:
            return f"<pre>{code}</pre>"
        names = [name.strip().partition(":")[0] for name in marker[1].split(",")]
        links = " · ".join(self.link_to(name, env) for name in names)
        return f'<details class="excerpt"><summary>{links}</summary><pre>{code}</pre></details>'

    code_block = fence  # it is marked by its indent alone

    def link_to(self, function: str, env: dict) -> str:
        """A link that shows a function in the panel."""
        shown = f"<code>{function}</code>"
        address = env["functions"].get(function)
        return f'<a class="f" href="{address}">{shown}</a>' if address else shown

    def code_inline(self, tokens, at, options, env) -> str:
        text = tokens[at].content
        if text in env["functions"]:
            return self.link_to(text, env)
        row = env["symbols"].names.get(text)
        mark = "" if row is None else f" data-s={row}"
        whole = OPTION.sub(r'<span class="option">\g<0></span>', html.escape(text))
        return f"<code{mark}>{whole}</code>"

    def html_block(self, tokens, at, options, env) -> str:
        """HTML as it stands; a comment marks what is drawn there, or is left out."""
        content = tokens[at].content
        if content.strip() == CARDS:
            return '<div class="cards"></div>'  # the list after it is shown as cards
        live = LIVE.match(content.strip())
        if live:
            return f'<div class="live {live[1]}" id="book-live-{live[1]}"></div>'
        return re.sub(r"<!--.*?-->\n?", "", content, flags=re.S)

    def image(self, tokens, at, options, env) -> str:
        """A picture, whose address holds it."""
        address = tokens[at].attrs["src"]
        about = html.escape(tokens[at].content)
        if "://" in address:  # a page loads nothing from elsewhere
            return about
        if not address.startswith("data:"):
            address = address_of_picture(env["path"].parent / address)
        return f'<img src="{address}" alt="{about}">'

    def paragraph_open(self, tokens, at, options, env) -> str:
        """A paragraph; one that is a picture scrolls inside itself, as a table does."""
        parts = tokens[at + 1].children
        is_picture = len(parts) == 1 and parts[0].type == "image"
        if is_picture:
            return '<p class="wide" tabindex="0">'
        return "" if tokens[at].hidden else "<p>"

    def heading_open(self, tokens, at, options, env) -> str:
        """A heading, with the anchor that GitHub gives it and the function of the panel."""
        tag = tokens[at].tag
        anchor = anchor_of(tokens[at + 1].content, env["anchors"])
        env["headings"].append((tag, anchor, tokens[at + 1]))
        after = tokens[at + 3] if at + 3 < len(tokens) else tokens[at]
        panel = PANEL.match(after.content)
        shows = f' data-panel="{panel[1]}"' if panel else ""
        return f'<{tag} id="{anchor}"{shows}>'

    def table_open(self, tokens, at, options, env) -> str:
        """A table, which scrolls inside itself; the rows of Symbols can be shown elsewhere."""
        headings = env["headings"]
        is_symbols = bool(headings) and headings[-1][1] == "symbols"
        kind = ' class="symbols"' if is_symbols and not env["symbols_stand"] else ""
        env["symbols_stand"] = env["symbols_stand"] or is_symbols
        return f'<div class="wide" tabindex="0"><table{kind}>'

    def table_close(self, tokens, at, options, env) -> str:
        return "</table></div>"

    def link_open(self, tokens, at, options, env) -> str:
        """A link to a page of the book, or to another site."""
        address = tokens[at].attrs["href"]
        file, sign, anchor = address.partition("#")
        if file and "://" not in address:
            to = Path(os.path.normpath(env["path"].parent / file))
            address = env["pages"].get(to, file) + sign + anchor
        return f'<a href="{html.escape(address)}">'

    def contents(self, options: dict, env: dict) -> str:
        """Links to the sections of a page; env["headings"] are those that were rendered."""
        links = []
        for tag, anchor, title in env["headings"]:
            if tag in ("h2", "h3"):
                shown = self.renderInline(title.children, options, env)
                words = re.sub(r"</?a\b[^>]*>| data-s=\S+?(?=[ >])", "", shown)
                links.append(f'<a class="{tag}" href="#{anchor}">{words}</a>')
        return "".join(links)


def address_of_picture(path: Path) -> str:
    """A picture as an address that holds it; a drawing has no paper, so that the page's shows."""
    kind, _ = mimetypes.guess_type(path)
    content = path.read_bytes()
    if path.suffix == ".svg":
        content = PAPER.sub(r"\1none", content.decode()).encode()
    picture = base64.b64encode(content).decode()
    return f"data:{kind};base64,{picture}"


def markdown_of(path: Path) -> str:
    """The Markdown of a page; of a notebook, its cells and what they printed."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        for name, picture in cell.get("attachments", {}).items():
            held = f"data:image/png;base64,{picture['image/png']}"
            source = source.replace(f"attachment:{name}", held)
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            printed = output.get("text") or output.get("data", {}).get("text/plain", [])
            parts.append(f"```\n{''.join(printed)}\n```" if printed else "")
    return "\n\n".join(parts)


def page_text(path: Path, pages: dict[Path, str], functions: dict[str, str]) -> Text:
    """A page of docs/ as HTML.

    `pages` is {file of the repository: page of the book}, `functions` {name: address of its code}.
    """
    markdown = MarkdownIt("commonmark", renderer_cls=Page).enable("table")
    markdown.inline.ruler.before("backticks", "math", inline_math)
    env = {"path": path, "pages": pages, "functions": functions, "headings": []}
    env["anchors"] = Counter()
    tokens = markdown.parse(markdown_of(path), env)
    env |= {"symbols": symbols_of(tokens), "symbols_stand": False}
    article = markdown.renderer.render(tokens, markdown.options, env)
    return Text(article, markdown.renderer.contents(markdown.options, env))


def file_text(path: Path, name: str) -> Text:
    """A file of the repository as HTML; of a folder, the names of its files."""
    if path.is_dir():
        names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        shown = f"<pre>{lines_html(html.escape(chr(10).join(names)))}</pre>"
    elif path.suffix in (".svg", ".png"):
        shown = f'<img src="{address_of_picture(path)}" alt="{name}">'
    else:
        lexer = find_lexer_class_for_filename(path.name) or TextLexer
        shown = f"<pre>{code_html(path.read_text(encoding='utf-8'), lexer=lexer)}</pre>"
    return Text(f"<h1><code>{html.escape(name)}</code></h1>{shown}", "")
