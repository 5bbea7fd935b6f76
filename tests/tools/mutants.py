"""Small faults in source code, each another node of one expression or statement.

mutate.py plants them. There are none in docstrings, messages, annotations, defaults of arguments,
decorators and class variables.
"""

import ast
import copy
import functools
import random
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PAIRS = """Add Sub, Mult Div, BitAnd BitOr, And Or, Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn,
    max min, maximum minimum, amax amin, argmax argmin, floor ceil, any all, sin cos, sigmoid tanh,
    mean sum, ones zeros,
    ones_like zeros_like, new_ones new_zeros, triu tril, triu_ tril_, logical_and logical_or"""
# {operator or function: what stands in its place}
OTHER = {"FloorDiv": "Mult", "Mod": "FloorDiv", "Pow": "Mult"}
for pair in PAIRS.split(","):
    first, second = pair.split()
    OTHER |= {first: second, second: first}
COMMUTATIVE = "add getattr isinstance max maximum min minimum mul promote_types swapaxes transpose"
REPORTS = "TrainedRun as_cell describe report score_lines score_record"


class Mutant(NamedTuple):
    """A fault: `new` in place of the node `old` of a file's tree.

    The statement, or its head, before and after.
    """

    file: str
    line: int
    kind: str
    before: str
    after: str
    tree: ast.Module
    old: ast.AST
    new: ast.AST


# Each kind yields (node, what stands in its place)


def operators(node):
    """Another operator, sign or comparison; no minus and no `not`."""
    match node:
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if (
            type(op).__name__ in OTHER
        ):
            yield node, changed(node, op=other(op))
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield node, changed(node, ops=[*ops[:at], other(op), *ops[at + 1 :]])
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield node, node.operand


def ends(node):
    """Ends of slices and ranges, off by one; constants() changes those that are literals."""
    found = [node.lower, node.upper] if isinstance(node, ast.Slice) else []
    if called(node) in ("range", "slice", "arange"):
        found = node.args[:2]
    for end in found:
        if end is not None and not isinstance(end, ast.Starred | ast.Constant | ast.UnaryOp):
            yield end, ast.BinOp(end, ast.Add(), ast.Constant(1))


def dropped_terms(node):
    """One of two terms or factors, of two conditions, of a concatenation's parts."""
    match node:
        case ast.BinOp(
            left, ast.Add() | ast.Mult() | ast.BitAnd() | ast.BitOr(), right
        ) | ast.BoolOp(_, [left, right]):
            yield node, left
            yield node, right
        case ast.BinOp(op=ast.Sub() | ast.Div() | ast.Pow()):
            yield node, node.left


def detachments(node):
    if called(node) == "detach" and isinstance(node.func, ast.Attribute):
        yield node, node.func.value
    if called(node) == "no_grad":
        yield node, changed(node, func=changed(node.func, attr="enable_grad"))


def constants(node):
    match node:
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value)):
            yield node, ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield node, ast.Constant(value * 2 or 1.0)


def removed_lines(node):
    """What changes something and binds no name for the first time."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call and not ast.unparse(node).startswith("super()"):
        yield node, ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield node, ast.Pass()
    if isinstance(node, ast.Assign):
        read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        targets = []
        for target in node.targets:
            targets += getattr(target, "elts", [target])
        if all(is_bound(target, read) for target in targets):
            yield node, ast.Pass()


def is_bound(target, read):
    """Whether a target is there before: a part of something, or a name that is read."""
    if isinstance(target, ast.Name):
        return target.id in read
    return isinstance(target, ast.Attribute | ast.Subscript)


def functions(node):
    """A function in place of its counterpart; a sequence not reversed."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in OTHER:
            yield node.func, changed(node.func, attr=OTHER[name])
        case ast.Call(func=ast.Name(id="max" | "min" | "any" | "all" as name)):
            yield node.func, changed(node.func, id=OTHER[name])
        case ast.Call(func=ast.Name(id="reversed")):
            yield node, node.args[0]


def arguments(node):
    """Two arguments, or the two sides of a matrix product, in place of each other."""
    if isinstance(node, ast.Call) and called(node) not in COMMUTATIVE.split():
        for at, (first, second) in enumerate(pairwise(node.args)):
            both_move = can_swap(first) and can_swap(second)
            if both_move and ast.dump(first) != ast.dump(second):
                swapped = [*node.args[:at], second, first, *node.args[at + 2 :]]
                yield node, changed(node, args=swapped)
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
    if is_product and ast.dump(node.left) != ast.dump(node.right):
        yield node, changed(node, left=node.right, right=node.left)


def can_swap(argument):
    """Whether an argument may stand in the next one's place."""
    return not isinstance(argument, ast.Starred | ast.GeneratorExp | ast.Constant | ast.UnaryOp)


def conditions(node):
    """A condition turned around."""
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
    for part in getattr(node, "generators", []):
        tests += part.ifs
    for test in tests:
        yield test, ast.UnaryOp(ast.Not(), test)


KINDS = (
    operators,
    ends,
    dropped_terms,
    detachments,
    constants,
    removed_lines,
    functions,
    arguments,
    conditions,
)


def changed(node, **fields):
    """A copy of a node with other fields."""
    other = copy.copy(node)
    vars(other).update(fields)
    return other


def other(op):
    """The operator that stands in an operator's place."""
    return getattr(ast, OTHER[type(op).__name__])()


def called(node):
    """The name of the function or method that a node calls, or None."""
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def below(node, statement):
    """(node, the statement that it is in) of a node and what is below it.

    What is only said or declared is left out.
    """
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or is_said(node):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        for part in node.body:
            if isinstance(node, ast.FunctionDef) or isinstance(part, ast.FunctionDef):
                yield from below(part, part)
        return
    yield node, statement
    if getattr(node, "arg", None) != "strict":
        for part in ast.iter_child_nodes(node):
            if part is not getattr(node, "annotation", None):
                yield from below(part, part if isinstance(part, ast.stmt) else statement)


def is_said(node):
    """Whether a node is a docstring, or prints or describes what was computed."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or called(node.value) == "print"
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in REPORTS.split()


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Every fault of a file below root, in the order of its lines."""
    text = (root / file).read_text()
    tree = ast.parse(text)
    found = {}
    for top in tree.body:
        if not is_computed(top):
            continue
        for node, statement in below(top, top):
            for make in KINDS:
                for old, new in make(node):
                    before = first_line(statement)
                    after = first_line(replaced(statement, old, new))
                    place = (old.lineno, old.col_offset, old.end_lineno, old.end_col_offset)
                    kind = make.__name__
                    mutant = Mutant(file, old.lineno, kind, before, after, tree, old, new)
                    found.setdefault((place, after), mutant)
    return [found[key] for key in sorted(found)]


def is_computed(top: ast.stmt) -> bool:
    """Whether a statement of a file is a function, a class or a constant."""
    if isinstance(top, ast.Assign):
        return isinstance(top.targets[0], ast.Name) and not isinstance(top.value, ast.Call)
    return isinstance(top, ast.FunctionDef | ast.ClassDef)


@functools.cache
def first_line(statement):
    return ast.unparse(statement).partition("\n")[0]


def replaced(node, old, new):
    """A copy of a node with `new` in place of `old`: deepcopy takes `new` for the copy of `old`."""
    return copy.deepcopy(node, {id(old): new})


def planted(mutant: Mutant) -> ast.Module:
    """The tree of a mutant's file with its fault."""
    return ast.fix_missing_locations(replaced(mutant.tree, mutant.old, mutant.new))


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of the mutants, or all if there are no more, in the order of files and lines."""
    drawn = random.Random(seed).sample(mutants, min(count, len(mutants)))
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.line))
