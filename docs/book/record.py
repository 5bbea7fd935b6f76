"""What every variable of a reference held, statement by statement, in cases of docs/vectors.

docs/book/__main__.py uses it.
"""

import ast
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

import numpy as np

from docs.excerpts import definitions, excerpt, files_of
from reference.gradients import function_of


class Place(NamedTuple):
    """Where a variable stands in the code: pointing there shows what `path` held."""

    line: int  # of the file, from 1
    column: int
    path: tuple  # (name,) or (name, attribute or key); ("return",) is what a function returns
    stored: bool  # its value is the one after the statement, not before
    lines: range  # of the statement


class Function(NamedTuple):
    """A function of a reference, or a class, which has no places."""

    name: str
    file: str  # below reference/
    first: int  # line of the file, from 1, with the comments above
    source: str
    places: list[Place]


@dataclasses.dataclass
class Call:
    """A call of a function, as a page wants it; it names other calls by their numbers."""

    function: str
    source: str  # the run it is of
    segment: int
    layer: int | None
    up: int | None  # the call that called it
    forward: int | None  # of a backward function: the call whose cache it was given
    held: list[int]  # number of the value of each place, -1 if it has none


def own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without those of statements and functions inside it."""
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, (ast.stmt, ast.Lambda)):
            yield node
            yield from own_nodes(node)


def names_of_loops(nodes: list[ast.AST]) -> set[str]:
    """The variables of the comprehensions among nodes."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.comprehension):
            inside = ast.walk(node.target)
            names |= {part.id for part in inside if isinstance(part, ast.Name)}
    return names


def places_of(statement: ast.stmt) -> Iterator[Place]:
    """The variables of a statement that can be pointed at."""
    nodes = list(own_nodes(statement))
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else statement.end_lineno + 1
    lines = range(statement.lineno, end)
    of_loops = names_of_loops(nodes)
    for node in [statement, *nodes]:
        match node:
            case ast.Return(value=ast.expr()):
                yield Place(node.lineno, node.col_offset, ("return",), True, lines)
            case ast.Name(id=name) if name not in of_loops:
                stored = isinstance(node.ctx, ast.Store)
                yield Place(node.lineno, node.col_offset, (name,), stored, lines)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute != "mT":
                column = node.end_col_offset - len(attribute)
                yield Place(node.lineno, column, (name, attribute), False, lines)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                yield Place(node.lineno, node.slice.col_offset + 1, (name, key), False, lines)


def places_in(function: ast.FunctionDef) -> list[Place]:
    """The places of a function: its arguments, and the variables of its statements."""
    first = range(function.lineno, function.lineno + 1)
    places = []
    for argument in [*function.args.args, *function.args.kwonlyargs]:
        places.append(Place(argument.lineno, argument.col_offset, (argument.arg,), True, first))
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and node is not function:
            places += places_of(node)
    return places


def functions_of(reference: Path) -> dict[str, Function]:
    """The functions and classes of a reference and of its variants by name, in their order."""
    found = {}
    for path in files_of(reference):
        file = path.relative_to(reference.parent).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = getattr(node, "name", None)
            if name is None or name in found:
                continue
            places = places_in(node) if isinstance(node, ast.FunctionDef) else []
            source = excerpt(reference, name).removesuffix("\n")
            line = definitions(reference)[name].first + 1
            found[name] = Function(name, file, line, source, places)
    return found


def parts_of(value: object) -> dict[str, object] | None:
    """The parts of a value that holds others, by their names, or None."""
    if isinstance(value, dict):
        return {str(name): part for name, part in value.items()}
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, (tuple, list)):
        return {str(number): part for number, part in enumerate(value)}
    return vars(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else None


def part_of(value: object, path: tuple) -> object:
    """What a path of names leads to from a value.

    If it leads nowhere, that is a class, which nothing shows.
    """
    for name in path:
        value = value.get(name, object) if isinstance(value, dict) else getattr(value, name, object)
    return value


def snapshot(value: object) -> np.ndarray | dict | None:
    """A value as it is now and as a page shows it; None if no page shows it.

    It is an array, {"text": text} or {"kind": type, "parts": {name: snapshot}}.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        return value.copy()
    if isinstance(value, (np.generic, np.ndarray, float)):
        return {"text": f"{float(value):.6g}"}
    if isinstance(value, (int, str, type(None))):
        return {"text": repr(value)}
    parts = parts_of(value)
    if parts is None:
        return None
    shown = {name: snapshot(part) for name, part in parts.items()}
    shown = {name: part for name, part in shown.items() if part is not None}
    return {"kind": type(value).__name__, "parts": shown}


class Values:
    """Every value that a page shows, once: snapshots, whose parts are numbers of others."""

    def __init__(self):
        self.shown = []
        self.numbers = {}

    def keep(self, shown: np.ndarray | dict | None) -> int:
        """The number in `shown` of a snapshot, or -1 if it is None."""
        if shown is None:
            return -1
        if isinstance(shown, np.ndarray):
            key = (shown.shape, shown.dtype.str, shown.tobytes())
        else:
            if "parts" in shown:
                parts = {name: self.keep(part) for name, part in shown["parts"].items()}
                shown = shown | {"parts": parts}
            key = repr(shown)
        if key not in self.numbers:
            self.numbers[key] = len(self.shown)
            self.shown.append(shown)
        return self.numbers[key]


class Recorder:
    """Records calls of the functions of a reference, the calls of a function in one run only."""

    def __init__(self, reference: ModuleType):
        self.functions = functions_of(Path(reference.__file__))
        self.codes = {}  # {function: its code}
        for name, function in self.functions.items():
            if function.places:
                self.codes[name] = function_of(reference, name).__code__
        self.calls: list[Call] = []
        self.values = Values()
        self.stack = []  # numbers of the calls that have not returned

    def record(self, source: str, segments: list, run: Callable, *arguments: object) -> None:
        """Record what run(*arguments) calls, without the functions that runs before it called."""
        self.source = source
        self.segments = segments
        # {(function, id of what it returned or of a part): (number of the call, the part)}; so the
        # part stays alive, and its id is no other's
        self.made = {}
        known = {call.function for call in self.calls}
        codes = self.codes.items()
        self.watched = {code: self.functions[name] for name, code in codes if name not in known}
        if not self.watched:  # nothing is left to record
            return
        sys.settrace(self.enter)
        try:
            run(*arguments)
        finally:
            sys.settrace(None)

    def segment_at(self, frame: FrameType | None) -> int:
        """The segment that a function outside all others is called for.

        It is a caller's variable `segment`.
        """
        while frame:
            for number, segment in enumerate(self.segments):
                if frame.f_locals.get("segment") is segment:
                    return number
            frame = frame.f_back
        return 0

    def forward_of(self, name: str, arguments: dict) -> int | None:
        """Of a backward function's call: the forward call that made one of its arguments."""
        forward = name.replace("backward", "forward")
        for given in arguments.values():
            if (forward, id(given)) in self.made:
                number, _ = self.made[forward, id(given)]
                return number
        return None

    def enter(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        """The trace function: begins a call; returns what records its lines."""
        function = self.watched.get(frame.f_code)
        if function is None:
            return None
        if self.stack:
            up = self.stack[-1]
            segment = self.calls[up].segment
            layer = self.calls[up].layer
        else:
            up = None
            segment = self.segment_at(frame.f_back)
            layer = None
        layer = frame.f_back.f_locals.get("layer", layer)
        forward = None
        if function.name.endswith("backward"):
            forward = self.forward_of(function.name, frame.f_locals)

        number = len(self.calls)
        call = Call(function.name, self.source, segment, layer, up, forward, [])
        self.stack.append(number)
        self.calls.append(call)
        return self.lines_of(function, number, frame.f_lineno)

    def lines_of(self, function: Function, number: int, last: int) -> Callable:
        """The trace function of one call.

        Before each line it holds what the last one stored and what this one reads.
        """
        latest = [None] * len(function.places)

        def line(frame: FrameType, event: str, result: object) -> Callable:
            nonlocal last
            now = frame.f_lineno if event == "line" else 0
            variables = frame.f_locals
            if event == "return":
                variables = variables | {"return": result}
            for at, place in enumerate(function.places):
                if (last if place.stored else now) in place.lines:
                    latest[at] = snapshot(part_of(variables, place.path))
            if event == "return":
                self.calls[number].held = [self.values.keep(shown) for shown in latest]
                self.leave(function.name, number, result)
            last = now
            return line

        return line

    def leave(self, name: str, number: int, result: object) -> None:
        """End a call: note what it made."""
        self.stack.pop()
        for part in result if isinstance(result, tuple) else (result,):
            if part is not None:
                self.made[name, id(part)] = (number, part)
