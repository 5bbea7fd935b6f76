"""What every variable of a reference held, statement by statement, in a run of a case of docs/vectors. For docs.book."""

import ast
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import NamedTuple

import numpy as np

from docs.excerpts import definitions


class Place(NamedTuple):
    """Where a variable stands in the code: pointing there shows what `path` held."""

    line: int  # of the file, from 1
    column: int
    path: tuple  # (name,) or (name, attribute or key); ("return",) is what a function returns
    stored: bool  # its value is the one after the statement, not before


class Function(NamedTuple):
    """A function or class of a reference."""

    name: str
    first: int  # line of the file, from 1, with the comments above
    source: str
    places: list[Place]
    statements: dict[int, tuple[list[int], list[int]]]  # {line: (numbers of places that are read, that are stored)}


@dataclasses.dataclass
class Call:
    """A call of a function, and what its places held."""

    function: str
    number: int  # how many calls of the function came before it in this run
    segment: int
    layer: int | None
    parent: "Call | None"
    held: list[int]  # number of the value of each place, -1 if it has none
    versions: dict[str, list] = dataclasses.field(default_factory=dict)  # {name: what it was bound to, in order}
    forward: "Call | None" = None  # of a backward function: the call whose cache it was given


def own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without those of statements and functions inside it."""
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, (ast.stmt, ast.Lambda)):
            yield node
            yield from own_nodes(node)


def is_text(node: ast.AST) -> bool:
    """Whether a node is a string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def places_of(statement: ast.stmt) -> list[Place]:
    """The variables of a statement that can be pointed at."""
    nodes, places = list(own_nodes(statement)), []
    inside = {
        name.id for node in nodes if isinstance(node, ast.comprehension) for name in ast.walk(node.target) if hasattr(name, "id")
    }
    if isinstance(statement, ast.Return) and statement.value:
        places.append(Place(statement.lineno, statement.col_offset, ("return",), True))
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in inside:
            places.append(Place(node.lineno, node.col_offset, (node.id,), isinstance(node.ctx, ast.Store)))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            places.append(Place(node.lineno, node.end_col_offset - len(node.attr), (node.value.id, node.attr), False))
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and is_text(node.slice):
            places.append(Place(node.lineno, node.slice.col_offset + 1, (node.value.id, node.slice.value), False))
    return places


def function_of(node: ast.AST, first: int, lines: list[str]) -> Function:
    """A definition, with its places by statement; a class has none."""
    source = "\n".join(lines[first : node.end_lineno])
    if isinstance(node, ast.ClassDef):
        return Function(node.name, first + 1, source, [], {})
    given = [*node.args.args, *node.args.kwonlyargs]
    places = [Place(argument.lineno, argument.col_offset, (argument.arg,), True) for argument in given]
    statements = {node.lineno: ([], list(range(len(places))))}
    for statement in ast.walk(node):
        if isinstance(statement, ast.stmt) and statement is not node:
            found, start = places_of(statement), len(places)
            numbers = ([start + k for k, place in enumerate(found) if place.stored is stored] for stored in (False, True))
            body = getattr(statement, "body", None)
            stop = body[0].lineno if body else statement.end_lineno + 1
            statements |= dict.fromkeys(range(statement.lineno, stop), tuple(numbers))
            places += found
    return Function(node.name, first + 1, source, places, statements)


def functions_of(reference: Path) -> dict[str, Function]:
    """The functions and classes of a file by name, in its order."""
    text = reference.read_text()
    lines, starts = text.splitlines(), definitions(reference)
    nodes = (node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return {node.name: function_of(node, starts[node.name][0], lines) for node in nodes}


def parts_of(value: object) -> list[tuple[str, object]] | None:
    """The named parts of a value that holds others, or None."""
    if isinstance(value, dict):
        return [(str(name), part) for name, part in value.items()]
    if hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, (tuple, list)):
        return [(str(number), part) for number, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return list(vars(value).items())
    return None


class Values:
    """Every value that a page shows, once: ("array", array), ("parts", kind, [(name, number)]) or ("text", text)."""

    def __init__(self):
        self.values, self.numbers = [], {}

    def keep(self, value: object) -> int:
        """The number of the value as it is now, or -1 if it is none that a page shows."""
        if isinstance(value, np.ndarray) and value.ndim:
            key, made = (value.shape, value.dtype.str, value.tobytes()), lambda: ("array", value.copy())
        elif isinstance(value, (np.generic, np.ndarray, float)):
            key = made = ("text", f"{float(value):.6g}")
        elif isinstance(value, (int, str, type(None))):
            key = made = ("text", repr(value))
        elif (parts := parts_of(value)) is not None:
            kept = [(name, self.keep(part)) for name, part in parts]
            kept = [(name, number) for name, number in kept if number >= 0]
            key = made = ("parts", type(value).__name__, tuple(kept))
        else:
            return -1
        if key not in self.numbers:
            self.numbers[key] = len(self.values)
            self.values.append(made() if callable(made) else made)
        return self.numbers[key]


def part_of(holder: dict, path: tuple) -> object:
    """What a path names among the variables of a frame; an object that nothing shows if there is none."""
    value = holder.get(path[0], object)
    for name in path[1:]:
        value = value.get(name, object) if isinstance(value, dict) else getattr(value, name, object)
    return value


class Recorder:
    """Records the calls of some functions of a reference while `record` runs."""

    def __init__(self, reference: ModuleType, functions: dict[str, Function], values: Values, segments: list):
        self.values, self.segments, self.calls, self.stack = values, segments, [], []
        self.functions = {getattr(reference, name).__code__: f for name, f in functions.items() if f.places}
        self.counts, self.caches, self.alive = Counter(), {}, []
        self.watched = {name: self.paired_names(name, functions) for name in functions}

    @staticmethod
    def paired_names(name: str, functions: dict[str, Function]) -> set[str]:
        """The variables x of a forward function whose backward function has a dx, and those that hold parameters."""
        backward = functions.get(backward_name(name))
        names = {place.path[0] for place in backward.places} if backward else set()
        return {n[1:] for n in names if n.startswith("d")} | ({"p", "params"} if "grads" in names else set())

    def record(self, run: Callable) -> object:
        """The result of run(), whose calls are recorded."""
        sys.settrace(self.enter)
        try:
            return run()
        finally:
            sys.settrace(None)

    def segment_at(self, frame: FrameType) -> int:
        """The segment that a function outside all others is called for: the caller's variable `segment`."""
        while frame:
            for number, segment in enumerate(self.segments):
                if frame.f_locals.get("segment") is segment:
                    return number
            frame = frame.f_back
        return 0

    def enter(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        """Begin a call; returns what records its lines."""
        function = self.functions.get(frame.f_code)
        if function is None:
            return None
        parent = self.stack[-1] if self.stack else None
        layer, segment = parent and parent.layer, parent.segment if parent else self.segment_at(frame.f_back)
        above = frame.f_back.f_locals.get("layer")
        layer = above if isinstance(above, int) else layer
        call = Call(function.name, self.counts[function.name], segment, layer, parent, [-1] * len(function.places))
        for given in frame.f_locals.values():
            call.forward = call.forward or self.caches.get((function.name, id(given)))
        self.counts[function.name] += 1
        self.calls.append(call)
        self.stack.append(call)
        return self.lines_of(function, call, frame)

    def lines_of(self, function: Function, call: Call, frame: FrameType) -> Callable:
        """The trace function of one call: before each statement what the last one stored and what this one reads."""
        current = function.statements[frame.f_code.co_firstlineno]

        def hold(numbers: list[int], variables: dict):
            for number in numbers:
                value = part_of(variables, function.places[number].path)
                call.held[number] = self.values.keep(value)

        def line(frame: FrameType, event: str, result: object) -> Callable:
            nonlocal current
            variables = frame.f_locals
            hold(current[1], variables | {"return": result if event == "return" else object})
            for name in self.watched[function.name]:
                value, versions = variables.get(name), call.versions.setdefault(name, [])
                if value is not None and (not versions or versions[-1] is not value):
                    versions.append(value)
            if event == "return":
                self.leave(function, call, result)
            elif event == "line":
                current = function.statements.get(frame.f_lineno, ([], []))
                hold(current[0], variables)
            return line

        return line

    def leave(self, function: Function, call: Call, result: object):
        """End a call; the backward call that is given a part of its result belongs to it."""
        self.stack.pop()
        self.alive.append(result)  # or another object could get its id
        for part in result if isinstance(result, tuple) else (result,):
            if part is not None:
                self.caches[backward_name(function.name), id(part)] = call


def backward_name(name: str) -> str:
    """The name of a forward function's backward."""
    return name.removesuffix("_forward") + "_backward" if name.endswith("_forward") else "backward" if name == "forward" else ""


STEP, TOLERANCE, SHOWN = 1e-5, 1e-5, 3  # of differences; relative, of what counts as equal; entries that a page shows


def moved(value: object, key: str | None, index: tuple, step: float) -> object:
    """A copy of an array, or of the array `key` of what holds it, with one entry moved."""
    if key is None:
        value = value.copy()
        value[index] += step
        return value
    part = moved(part_of({"value": value}, ("value", key)), None, index, step)
    return value._replace(**{key: part}) if hasattr(value, "_replace") else value | {key: part}


def with_moved(run: Callable, code: CodeType, number: int, name: str, version: int, change: Callable) -> float:
    """run(), in which call `number` of a function goes on with change(value) after it has bound `name` for that time."""
    calls = -1

    def enter(frame, event, argument):
        nonlocal calls
        if frame.f_code is not code:
            return None
        calls += 1
        if calls != number:
            return None
        bound, last = -1, None

        def line(frame, event, argument):
            nonlocal bound, last
            value = frame.f_locals.get(name)
            if value is not None and value is not last:
                bound, last = bound + 1, value
                if bound == version:
                    sys.settrace(None)
                    frame.f_locals[name] = change(value)
                    return None
            return line

        return line

    sys.settrace(enter)
    try:
        return run()
    finally:
        sys.settrace(None)


class Difference(NamedTuple):
    """The value that a gradient belongs to, and finite differences of the objective: [(flat entry, by differences)]."""

    value: int
    entries: list[tuple[int, float]]


def gradient_paths(function: Function, forward: Call) -> Iterator[tuple[int, str, str | None]]:
    """(number of a place, variable of the forward call, its part or None) of the gradients in a backward function."""
    for number, place in enumerate(function.places):
        name = place.path[0]
        if name == "grads" and len(place.path) == 1:
            holder = "params" if forward.versions.get("params") else "p"
            yield from ((number, holder, key) for key in (forward.versions.get(holder) or [{}])[0])
        elif name.startswith("d") and forward.versions.get(name[1:]):
            holder = forward.versions[name[1:]][0]
            yield from ((number, name[1:], key) for key in getattr(holder, "_fields", place.path[1:] or (None,)))


def differences_of(run: Callable, codes: dict, functions: dict, calls: list[Call], values: Values) -> Iterator[tuple]:
    """(call, "path:value number", Difference) of each gradient in a backward call that equals the derivative of run().

    A gradient that is still being summed is none, and has no entry.
    """
    for call in calls:
        seen = set()
        if call.forward is None:
            continue
        code = codes[call.forward.function]
        for number, name, key in gradient_paths(functions[call.function], call.forward):
            path, held = functions[call.function].places[number].path, call.held[number]
            kind, *rest = values.values[held] if held >= 0 else ("none",)
            if kind == "parts" and key is not None:
                held = dict(rest[1]).get(key, -1)
                path = (*path, key)
            found = f"{'.'.join(path)}:{held}"
            if found in seen or held < 0 or values.values[held][0] != "array":
                continue
            seen.add(found)
            gradient = values.values[held][1]
            if gradient.dtype.kind != "f":
                continue
            difference = compared(run, code, call.forward, (name, key), gradient, values)
            if difference:
                yield call, found, difference


def compared(run: Callable, code: CodeType, forward: Call, variable: tuple, gradient: np.ndarray, values: Values):
    """The Difference of a gradient, or None if it is not that of any value that the variable was bound to."""
    name, key = variable
    largest = np.argsort(-np.abs(gradient), axis=None, kind="stable")[:SHOWN]
    for version in reversed(range(len(forward.versions[name]))):
        holder = forward.versions[name][version]
        value = holder if key is None else part_of({"value": holder}, ("value", key))
        if not isinstance(value, np.ndarray) or value.shape != gradient.shape or value.dtype.kind != "f":
            continue
        entries = []
        for flat in largest:
            index = np.unravel_index(flat, value.shape)
            above, below = (
                with_moved(run, code, forward.number, name, version, lambda old, i=index, s=sign: moved(old, key, i, s * STEP))
                for sign in (1, -1)
            )
            numeric = (above - below) / (2 * STEP)
            if abs(numeric - gradient[index]) > TOLERANCE * max(abs(numeric), abs(gradient[index]), 1e-5):
                break
            entries.append((int(flat), numeric))
        else:
            return Difference(values.keep(value), entries)
    return None
