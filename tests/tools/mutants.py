"""Small faults in source text, each a few characters of one expression or statement; tests/tools/mutate.py plants them.

Not in docstrings, messages, annotations, defaults of arguments, decorators, class variables, demonstrations.
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

# {operator: (as it is written, what is written instead)}
OTHER = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*")}
OTHER |= {ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.And: ("and", "or")}
OTHER |= {ast.Or: ("or", "and"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
OTHER |= {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
OTHER |= {ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}
PAIRS = """max min, maximum minimum, amax amin, argmax argmin, floor ceil, any all, sin cos, sigmoid tanh, mean sum, ones zeros,
    ones_like zeros_like, new_ones new_zeros, triu tril, triu_ tril_, logical_and logical_or"""
OTHER_FUNCTION = {a: b for pair in PAIRS.split(",") for a, b in (pair.split(), reversed(pair.split()))}
COMMUTATIVE = {"add", "getattr", "isinstance", "max", "maximum", "min", "minimum", "mul"}
COMMUTATIVE |= {"promote_types", "swapaxes", "transpose"}
TAKES_AXIS = """all any amax amin argmax argmin argsort cat concatenate cumsum expand_dims flatten flip gather index_copy_
    index_select log_softmax max mean min movedim permute put_along_axis repeat roll scatter scatter_add_ size softmax sort split
    squeeze stack sum swapaxes take_along_axis transpose unbind unflatten unfold unsqueeze"""
REPORTS = ("TrainedRun", "as_cell", "check_score", "describe", "report", "score_lines", "score_record")
SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.UnaryOp, ast.BinOp)


class Edit(NamedTuple):
    """A replacement of bytes start..stop - 1 of a source by text."""

    start: int
    stop: int
    text: str


class Mutant(NamedTuple):
    """A fault: an Edit of a file, and the lines that it changes, joined to one, before and after."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    edit: Edit


class Source:
    """A file's bytes, and where the nodes of its tree stand in them."""

    def __init__(self, data: bytes):
        self.data = data
        self.lines = [0]
        for line in data.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends."""
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.data[slice(*self.span(node))].decode()

    def put(self, node: ast.AST, text: str) -> Edit:
        """The Edit that puts text in place of a node; the number of lines stays, so that functions keep their first lines."""
        lost = node.end_lineno - node.lineno - text.count("\n")
        text = f"{text[:-1]}{chr(10) * lost})" if text.endswith(")") else text + "\n" * lost
        return Edit(*self.span(node), text)

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Edit:
        """The Edit that replaces an operator between two nodes."""
        at = self.data.index(old.encode(), self.span(left)[1], self.span(right)[0])
        return Edit(at, at + len(old), new)


def operators(source, node):
    """Another operator, sign or comparison; no minus and no `not`."""
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER and not joins(node):
        yield source.between(node.left, node.right, *OTHER[type(node.op)])
    if isinstance(node, ast.AugAssign) and type(node.op) in OTHER:
        yield source.between(node.target, node.value, *OTHER[type(node.op)])
    if isinstance(node, ast.BoolOp):
        yield from (source.between(left, right, *OTHER[type(node.op)]) for left, right in pairwise(node.values))
    if isinstance(node, ast.Compare):
        for (left, right), op in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
            yield source.between(left, right, *OTHER[type(op)])
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
        operand = source.text(node.operand)
        yield source.put(node, operand if isinstance(node.op, ast.USub) else f"({operand})")


def indices(source, node):
    """Places in a row, and ends of ranges, off by one."""
    yield from (off_by_one(source, place) for place in places_of(node))
    if isinstance(node, ast.Call) and called(node) in ("range", "slice", "arange"):
        yield from (off_by_one(source, end) for end in node.args[:2] if all(isinstance(a, SIMPLE) for a in node.args[:2]))


def places_of(node):
    """A subscript's places that are literals, and the ends of its slices."""
    if isinstance(node, ast.Subscript):
        for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            if isinstance(part, ast.Slice):
                yield from (end for end in (part.lower, part.upper) if end is not None)
            elif number(part) is not None:
                yield part


def dropped_terms(source, node):
    """One of two terms or factors, of two conditions, of a concatenation's parts."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
        yield from (source.put(node, f"({source.text(kept)})") for kept in (node.left, node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div | ast.Pow):
        yield source.put(node, f"({source.text(node.left)})")
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        yield from (source.put(node, f"({source.text(kept)})") for kept in node.values)


def axes(source, node):
    if isinstance(node, ast.Attribute) and node.attr == "T":
        yield source.put(node, source.text(node.value))
    if isinstance(node, ast.Call) and called(node) == "einsum":
        inputs, out = ast.literal_eval(node.args[0]).split("->")
        yield source.put(node.args[0], f'"{inputs}->{out[:-2]}{out[:-3:-1]}"')
    for axis in axes_of(node):
        value = number(axis)
        yield source.put(axis, str(value - 1 if value else 1) if value != -2 else "-1")


def axes_of(node):
    """The nodes of a call's axes."""
    if not isinstance(node, ast.Call):
        return
    given = [word.value for word in node.keywords if word.arg in ("axis", "dim")]
    if isinstance(node.func, ast.Attribute) and called(node) in TAKES_AXIS.split():
        given += node.args
    for value in given:
        for part in value.elts if isinstance(value, ast.Tuple) else [value]:
            if isinstance(number(part), int):
                yield part


def detachments(source, node):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and called(node) == "detach":
        yield source.put(node, source.text(node.func.value))
    if isinstance(node, ast.Call) and ast.unparse(node) == "torch.no_grad()":
        yield source.put(node, "torch.enable_grad()")


def constants(source, node):
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.put(node, str(not node.value))
    elif (value := number(node)) is not None:
        other = value + 1 if isinstance(value, int) else (value * 2 or 1.0)
        yield source.put(node, repr(other) if other >= 0 else f"({other!r})")


def removed_lines(source, node):
    """What changes something and binds no name for the first time."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not ast.unparse(node).startswith("super()"):
        yield source.put(node, "pass")
    if isinstance(node, ast.AugAssign):
        yield source.put(node, "pass")
    if isinstance(node, ast.Assign):
        read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        if all(isinstance(t, ast.Attribute | ast.Subscript) or (isinstance(t, ast.Name) and t.id in read) for t in targets):
            yield source.put(node, "pass")


def functions(source, node):
    """A function in place of its counterpart; a sequence not reversed."""
    if isinstance(node, ast.Call) and called(node) in OTHER_FUNCTION:
        if isinstance(node.func, ast.Attribute):
            stop = source.span(node.func)[1]
            yield Edit(stop - len(node.func.attr), stop, OTHER_FUNCTION[node.func.attr])
        elif called(node) in ("max", "min", "any", "all"):
            yield source.put(node.func, OTHER_FUNCTION[called(node)])
    if isinstance(node, ast.Call) and called(node) == "reversed":
        yield source.put(node.func, "")


def arguments(source, node):
    """Two arguments, or the two sides of a matrix product, in place of each other."""
    if isinstance(node, ast.Call) and called(node) not in COMMUTATIVE:
        for pair in pairwise(node.args):
            if not any(isinstance(a, ast.Starred | ast.GeneratorExp) or number(a) is not None for a in pair):
                yield from swapped(source, *pair)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield from swapped(source, node.left, node.right, "({})")


def conditions(source, node):
    """A condition turned around."""
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
    tests += [test for part in getattr(node, "generators", []) for test in part.ifs]
    yield from (source.put(test, f"(not ({source.text(test)}))") for test in tests)


KINDS = (operators, indices, dropped_terms, axes, detachments, constants, removed_lines, functions, arguments, conditions)


def called(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)


def joins(node):
    """Whether an operator joins or repeats sequences."""
    sequences = (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr)
    return any(isinstance(side, sequences) or isinstance(getattr(side, "value", None), str) for side in (node.left, node.right))


def number(node):
    """A literal's value, with its sign, or None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value
    return node.value if isinstance(node, ast.Constant) and type(node.value) in (int, float) else None


def off_by_one(source, node):
    if (value := number(node)) is not None:
        return source.put(node, str(value + 1 if value >= 0 else value - 1))
    text = source.text(node)
    return source.put(node, f"({text if isinstance(node, SIMPLE) else f'({text})'} + 1)")


def swapped(source, left, right, form="{}"):
    """The Edit that swaps two nodes, each in form; nothing if they are the same text."""
    a, b = form.format(source.text(left)), form.format(source.text(right))
    if a != b:
        (start, end), (begin, stop) = source.span(left), source.span(right)
        yield Edit(start, stop, b + source.data[end:begin].decode() + a)


def planted_in(tree: ast.Module, skipped: range) -> Iterator[ast.AST]:
    """The nodes of a module in which faults are planted: what does not begin in the skipped lines."""
    for node in tree.body:
        constant = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not isinstance(node.value, ast.Call)
        if node.lineno not in skipped and (constant or isinstance(node, ast.FunctionDef | ast.ClassDef)):
            yield from below(node)


def demonstration_of(data: bytes) -> range:
    """The lines of a reference's demonstration: from its heading to that of the next section."""
    found = re.search(rb"(?ms)^# demonstration.*?(?=^# ---|\Z)", data)
    return range(*(data.count(b"\n", 0, at) + 1 for at in found.span())) if found else range(0)


def below(node, known=frozenset()):
    """A node and what is below it, without what is only said or declared, and without `known`: an axis is no constant too."""
    if id(node) in known or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or is_said(node):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        for part in node.body:
            if isinstance(node, ast.FunctionDef) or isinstance(part, ast.FunctionDef):
                yield from below(part)
        return
    yield node
    skipped = [*axes_of(node), *(place for place in places_of(node) if number(place) is not None)]
    if number(node) is not None:
        skipped += ast.iter_child_nodes(node)
    if isinstance(node, ast.AnnAssign):
        skipped.append(node.annotation)
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        skipped += node.body
    if isinstance(node, ast.Call):
        skipped += [word for word in node.keywords if word.arg == "strict"]
    known |= {id(part) for part in skipped}
    for part in ast.iter_child_nodes(node):
        yield from below(part, known)


def is_said(node):
    """Whether a node is a docstring, or prints or describes what was computed."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or (isinstance(node.value, ast.Call) and called(node.value) == "print")
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in REPORTS


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Every fault of a file below root, in the order of its lines."""
    data = (root / file).read_bytes()
    source, found = Source(data), {}
    for node in planted_in(ast.parse(data), demonstration_of(data)):
        for make in KINDS:
            for edit in make(source, node):
                line, last = (data.count(b"\n", 0, end) + 1 for end in edit[:2])
                head, tail = data[source.lines[line - 1] : edit.start].decode(), data[edit.stop : source.lines[last]].decode()
                before, after = (head + middle + tail for middle in (data[edit.start : edit.stop].decode(), edit.text))
                mutant = Mutant(file, line, make.__name__, " ".join(before.split()), " ".join(after.split()), edit)
                found.setdefault(edit, mutant)
    return sorted(found.values(), key=lambda mutant: mutant.edit)


def changed(root: Path, mutant: Mutant) -> str:
    """The text of a mutant's file with its fault."""
    data = (root / mutant.file).read_bytes()
    return (data[: mutant.edit.start] + mutant.edit.text.encode() + data[mutant.edit.stop :]).decode()


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of the mutants, drawn in turn from every file and kind."""
    groups, rng = defaultdict(list), random.Random(seed)
    for mutant in mutants:
        groups[mutant.file, mutant.kind].append(mutant)
    rows = [rng.sample(group, len(group)) for group in groups.values()]
    rng.shuffle(rows)
    turns = [row[turn] for turn in range(max(map(len, rows), default=0)) for row in rows if turn < len(row)]
    return sorted(turns[:count], key=lambda mutant: (mutant.file, mutant.edit))
