"""LaTeX as MathML that a narrow page can break, with its symbols marked.

A formula is made of pieces, and the page breaks a line between two of them. The rows of an
`aligned` formula keep their reasons in a column of their own. docs/book/text.py uses it.
"""

import html
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from latex2mathml.converter import convert

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.S)
OPENS = {"{", r"\left", r"\begin"}
CLOSES = {"}", r"\right", r"\end"}
SPACES = {r"\quad", r"\qquad"}
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\approx", r"\in", r"\mapsto"}
OPERATORS = {"+", "-", r"\odot", r"\cdot", r"\times"}
# what stands before an operator of one operand, such as a minus sign
NO_OPERAND = {"", "(", "[", ",", ";", "|", "^", "_"} | SPACES | RELATIONS | OPERATORS
ALIGNED = re.compile(r"\\begin\{aligned\}(.*)\\end\{aligned\}", re.S)
SHORT = 6  # tokens: so short a left side does not stand alone at the end of a line of text
BOLD = {chr(ord("a") + n): chr(0x1D41A + n) for n in range(26)}
TEXT = re.compile(r"\\text\{([^{}]*)\}")


def at_top_level(latex: str) -> Iterator[tuple[str, bool]]:
    """The tokens of LaTeX, each with whether it stands outside of all groups."""
    depth = 0
    for token in TOKEN.findall(latex):
        depth -= token in CLOSES
        yield token, depth == 0
        depth += token in OPENS


def split(latex: str, separators: set[str]) -> list[str]:
    """The parts of LaTeX between separators that stand outside of all groups."""
    parts = [""]
    for token, is_outside in at_top_level(latex):
        if token in separators and is_outside:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def begins_piece(token: str, before: str, relations: bool) -> bool:
    """Whether a line may break between two tokens: at a relation, or at an operator or comma."""
    if relations:
        return token in RELATIONS
    follows_comma = before == "," and token not in SPACES
    return follows_comma or (token in OPERATORS and before not in NO_OPERAND)


def pieces(latex: str, relations: bool) -> list[str]:
    """LaTeX cut where a line may break; a piece may begin with the operator it was cut at."""
    found = [""]
    before = ""
    for token, is_outside in at_top_level(latex):
        if not token.isspace():
            if is_outside and begins_piece(token, before, relations) and found[-1].strip():
                found.append("")
            before = token if is_outside else "group"
        found[-1] += token
    return found


class Symbols:
    """The symbols of a chapter's table, and the code names beside them.

    An element of a formula is a symbol if it is written in the same way, or if it differs in its
    index alone: M_{t+1} is explained as M_t is.
    """

    def __init__(self):
        self.exact = {}  # {MathML: row}
        self.bases = {}  # {MathML of what has an index: row}
        self.names = {}  # {code name: row}

    def add(self, latex: str, row: int) -> None:
        """Note the symbols of a cell, such as s_t, s_{t,n}."""
        for part in separate_symbols(latex):
            symbol = tree_of(part)[0][0]
            self.exact.setdefault(ElementTree.tostring(symbol), row)
            if symbol.tag == "msub" and is_index(symbol[1]):
                self.bases.setdefault(ElementTree.tostring(symbol[0]), row)

    def row_of(self, element: ElementTree.Element) -> int | None:
        """The row that explains an element of a formula, or None."""
        whole = ElementTree.tostring(element)
        if whole in self.exact:
            return self.exact[whole]
        if element.tag == "mi":
            return self.bases.get(whole)
        if element.tag in ("msub", "msubsup") and is_index(element[1]):
            return self.bases.get(ElementTree.tostring(element[0]))
        return None

    def mark(self, element: ElementTree.Element) -> None:
        """Give the symbols inside an element the number of their row."""
        for part in element:
            row = self.row_of(part)
            if row is None:
                self.mark(part)
            else:
                part.set("data-s", str(row))


def separate_symbols(latex: str) -> list[str]:
    """The symbols of a list of them; commas in brackets separate none."""
    grouped = latex.replace("(", "{(").replace(")", ")}")
    return [part for part in split(grouped, {","}) if part.strip()]


def is_index(element: ElementTree.Element) -> bool:
    """Whether a subscript is an index: small letters and numbers alone, as in t + 1."""
    leaves = [leaf for leaf in element.iter() if leaf.tag in ("mi", "mn", "mtext")]
    return bool(leaves) and all(re.fullmatch(r"[a-zα-ω]|\d+", leaf.text or "") for leaf in leaves)


def tree_of(latex: str, display: str = "inline") -> ElementTree.Element:
    """The MathML of a piece, as a tree without a namespace."""
    known = latex.replace("{aligned}", "{align*}")  # as latex2mathml knows it
    first = TOKEN.match(latex.strip())
    if first and first[0] in RELATIONS | OPERATORS:
        known = "{}" + known  # it stands between two things, also at the begin of a piece
    tree = ElementTree.fromstring(convert(known, xmlns="", display=display))
    del tree.attrib["display"]
    for letter in tree.iter("mi"):
        if letter.get("mathvariant") == "bold" and letter.text in BOLD:
            letter.text = BOLD[letter.text]  # browsers draw this, and ignore the attribute
            del letter.attrib["mathvariant"]
    return tree


def piece_html(latex: str, symbols: Symbols, display: bool) -> str:
    """A piece as a MathML element."""
    tree = tree_of(latex, "block" if display else "inline")
    symbols.mark(tree)
    if display:
        tree.set("displaystyle", "true")
    return ElementTree.tostring(tree, "unicode")


def apart(latex: str) -> list[str]:
    """The formulas that stand in one line of LaTeX, with a wide space between two of them."""
    parts = split(latex, SPACES)
    return parts if parts[0].strip() else [latex]  # a space at the begin indents


def flowing(latex: str, symbols: Symbols, display: bool) -> str:
    """A line of formulas, each of which is broken only if it is wider than the page."""
    formulas = [breaking(part, symbols, display) for part in apart(latex)]
    if len(formulas) == 1:
        return formulas[0]
    return "".join(f'<span class="apart">{formula}</span>' for formula in formulas)


def breaking(latex: str, symbols: Symbols, display: bool) -> str:
    """A formula that breaks at its relations, and at operators only if it must."""
    spans = []
    relations = pieces(latex, relations=True)
    if not display and len(relations) > 1 and len(TOKEN.findall(relations[0])) <= SHORT:
        relations[:2] = ["".join(relations[:2])]
    for relation in relations:
        inside = pieces(relation, relations=False)
        shown = "".join(piece_html(piece, symbols, display) for piece in inside)
        spans.append(shown if len(inside) == 1 else f"<span>{shown}</span>")
    return "".join(spans)


def inline_formula(latex: str, symbols: Symbols) -> str:
    """A formula in a line of text; a screen reader and a copy get its LaTeX."""
    latex = latex.strip()
    label = f'role="math" aria-label="{html.escape(latex)}"'
    return f'<span class="math" {label}>{flowing(latex, symbols, False)}</span>'


def reason_html(latex: str, symbols: Symbols) -> str:
    """The reason of a row: its text is text of the page, so that it can break."""
    shown = []
    for number, part in enumerate(TEXT.split(latex)):
        if number % 2:
            shown.append(html.escape(part))
        elif part.strip():
            shown.append(inline_formula(part, symbols))
    return f'<span class="why">{"".join(shown)}</span>'


def row_html(latex: str, symbols: Symbols) -> tuple[str, int]:
    """(a row of an aligned formula, its number of columns without the reason's)."""
    cells = [cell.strip() for cell in split(latex, {"&"})]
    reason = ""
    if len(cells) > 1 and cells[-1].startswith(r"\text{"):
        reason = reason_html(cells.pop(), symbols)
        while not cells[-1]:
            cells.pop()
    shown = [f"<span>{flowing(cell, symbols, True) if cell else ''}</span>" for cell in cells]
    return f"<div>{''.join(shown)}{reason}</div>", len(cells)


def display_formula(latex: str, symbols: Symbols) -> str:
    """A formula that stands alone; rows if it is `aligned`."""
    latex = latex.strip()
    aligned = ALIGNED.fullmatch(latex)
    label = f'role="math" aria-label="{html.escape(latex)}"'
    if aligned is None:
        return f'<div class="formula" {label}>{flowing(latex, symbols, True)}</div>'
    rows = [row_html(row, symbols) for row in split(aligned[1], {r"\\"}) if row.strip()]
    columns = max(count for _, count in rows)
    shown = "".join(row for row, _ in rows)
    return f'<div class="formula aligned" style="--columns: {columns}" {label}>{shown}</div>'
