"""What every variable of a reference held, statement by statement, in runs of cases of docs/vectors. For docs.book."""

import ast
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

import numpy as np

from docs.excerpts import definitions, excerpt

STEP, TOLERANCE, SHOWN = (
    1e-5,
    1e-5,
    3,
)  # of differences; relative, of what counts as equal; entries that a page shows


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
    beside: dict[
        str, tuple
    ]  # {path and value of a gradient: (number of its variable's value, [(flat entry, by differences)])}


def own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without those of statements and functions inside it."""
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, (ast.stmt, ast.Lambda)):
            yield node
            yield from own_nodes(node)


def places_of(statement: ast.stmt) -> Iterator[Place]:
    """The variables of a statement that can be pointed at."""
    nodes, body = list(own_nodes(statement)), getattr(statement, "body", None)
    lines = range(statement.lineno, body[0].lineno if body else statement.end_lineno + 1)
    targets = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    inside = {
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    }
    for node in [statement, *nodes]:
        match node:
            case ast.Return(value=ast.expr()):
                yield Place(node.lineno, node.col_offset, ("return",), True, lines)
            case ast.Name(id=name) if name not in inside:
                yield Place(
                    node.lineno, node.col_offset, (name,), isinstance(node.ctx, ast.Store), lines
                )
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                yield Place(
                    node.lineno,
                    node.end_col_offset - len(attribute),
                    (name, attribute),
                    False,
                    lines,
                )
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                yield Place(node.lineno, node.slice.col_offset + 1, (name, key), False, lines)


def functions_of(reference: Path) -> dict[str, Function]:
    """The functions and classes of a file by name, in its order."""
    found = {}
    for node in ast.parse(reference.read_text()).body:
        places = []
        if isinstance(node, ast.FunctionDef):
            given, first = (
                [*node.args.args, *node.args.kwonlyargs],
                range(node.lineno, node.lineno + 1),
            )
            places = [
                Place(argument.lineno, argument.col_offset, (argument.arg,), True, first)
                for argument in given
            ]
            inside = (
                part for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node
            )
            places += [place for statement in inside for place in places_of(statement)]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            source, line = (
                excerpt(reference, node.name).removesuffix("\n"),
                definitions(reference)[node.name][0] + 1,
            )
            found[node.name] = Function(node.name, line, source, places)
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
    """What a path of names leads to from a value; a class, which nothing shows, if it leads nowhere."""
    for name in path:
        value = value.get(name, object) if isinstance(value, dict) else getattr(value, name, object)
    return value


class Values:
    """Every value that a page shows, once: `shown` are arrays, {"text": text} and {"kind": type, "parts": {name: number}}."""

    def __init__(self):
        self.shown, self.numbers = [], {}

    def keep(self, value: object) -> int:
        """The number in `shown` of the value as it is now, or -1 if it is none that a page shows."""
        key = None
        if isinstance(value, np.ndarray) and value.ndim:
            key, shown = (value.shape, value.dtype.str, value.tobytes()), value
        elif isinstance(value, (np.generic, np.ndarray, float)):
            shown = {"text": f"{float(value):.6g}"}
        elif isinstance(value, (int, str, type(None))):
            shown = {"text": repr(value)}
        elif (parts := parts_of(value)) is not None:
            kept = {name: self.keep(part) for name, part in parts.items()}
            shown = {
                "kind": type(value).__name__,
                "parts": {name: number for name, number in kept.items() if number >= 0},
            }
        else:
            return -1
        key = key or repr(shown)
        if key not in self.numbers:
            self.numbers[key] = len(self.shown)
            self.shown.append(shown.copy())
        return self.numbers[key]


def traced(trace: Callable, run: Callable, *arguments: object) -> object:
    """run(*arguments) under a trace function."""
    sys.settrace(trace)
    try:
        return run(*arguments)
    finally:
        sys.settrace(None)


def is_new(bound: list, value: object) -> bool:
    """Whether a variable is bound to a value anew, which is then added to what it was bound to before."""
    new = value is not None and not (bound and bound[-1] is value)
    if new:
        bound.append(value)
    return new


class Recorder:
    """Records calls of the functions of a reference, the calls of a function in one run only."""

    def __init__(self, reference: ModuleType):
        self.functions = functions_of(Path(reference.__file__))
        self.codes = {
            name: getattr(reference, name).__code__
            for name, function in self.functions.items()
            if function.places
        }
        self.calls, self.values, self.stack = [], Values(), []
        self.bound = []  # of each call {variable: what it was bound to, in order}

    def record(self, source: str, segments: list, run: Callable, *arguments: object):
        """Record what run(*arguments) calls, without the functions that runs before it called."""
        self.source, self.segments = source, segments
        self.made = {}  # {(function, id of what it returned or of a part): (number of the call, the part, which stays alive)}
        known = {call.function for call in self.calls}
        self.watched = {
            code: self.functions[name] for name, code in self.codes.items() if name not in known
        }
        traced(self.enter, run, *arguments)

    def segment_at(self, frame: FrameType | None) -> int:
        """The segment that a function outside all others is called for: a caller's variable `segment`."""
        while frame:
            for number, segment in enumerate(self.segments):
                if frame.f_locals.get("segment") is segment:
                    return number
            frame = frame.f_back
        return 0

    def enter(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        """The trace function: begins a call; returns what records its lines."""
        function, forward = self.watched.get(frame.f_code), None
        if function is None:
            return None
        up = self.stack[-1] if self.stack else None
        segment, layer = (
            (self.segment_at(frame.f_back), None)
            if up is None
            else (self.calls[up].segment, self.calls[up].layer)
        )
        if function.name.endswith("backward"):
            of = [
                (function.name.replace("backward", "forward"), id(given))
                for given in frame.f_locals.values()
            ]
            forward = next((self.made[key][0] for key in of if key in self.made), None)
        layer, held = frame.f_back.f_locals.get("layer", layer), [-1] * len(function.places)
        self.stack.append(len(self.calls))
        self.calls.append(Call(function.name, self.source, segment, layer, up, forward, held, {}))
        self.bound.append({})
        return self.lines_of(function, len(self.calls) - 1, frame.f_lineno)

    def lines_of(self, function: Function, number: int, last: int) -> Callable:
        """The trace function of one call: before each line it holds what the last one stored and what this one reads."""
        held, bound = self.calls[number].held, self.bound[number]

        def line(frame: FrameType, event: str, result: object) -> Callable:
            nonlocal last
            now, variables = frame.f_lineno if event == "line" else 0, frame.f_locals
            for name, value in variables.items():
                is_new(bound.setdefault(name, []), value)
            if event == "return":
                variables = variables | {"return": result}
                self.stack.pop()
                parts = result if isinstance(result, tuple) else (result,)
                self.made |= {
                    (function.name, id(part)): (number, part) for part in parts if part is not None
                }
            for at, place in enumerate(function.places):
                if (last if place.stored else now) in place.lines:
                    held[at] = self.values.keep(part_of(variables, place.path))
            last = now
            return line

        return line

    def add_differences(self, run: Callable):
        """Put beside each gradient in a backward call, if it is a derivative of run(), its variable's value and differences.

        A gradient that is still being summed is none, and gets no entry.
        """
        for number, call in enumerate(self.calls):
            for place, about in self.gradients_in(number).items():
                difference = self.difference(run, call.forward, *about)
                if difference:
                    call.beside[place] = difference

    def gradients_in(self, number: int) -> dict[str, tuple]:
        """{path and number of a value: (variable of the forward call, its part, array)} of what may be gradients in a call."""
        call, found = self.calls[number], {}
        bound = {} if call.forward is None else self.bound[call.forward]
        for place, held in zip(self.functions[call.function].places, call.held, strict=True):
            name = place.path[0]
            variable = (
                ("params" if bound.get("params") else "p")
                if place.path == ("grads",)
                else name[1:] * (name[0] == "d")
            )
            if held < 0 or not bound.get(variable):
                continue
            shown, parts = self.values.shown[held], {(): held}
            if isinstance(shown, dict):
                whole = name == "grads" or hasattr(bound[variable][0], "_fields")
                parts = {(key,): of for key, of in shown.get("parts", {}).items() if whole}
            for key, of in parts.items():
                path, array = (*place.path, *key), self.values.shown[of]
                if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                    found[f"{'.'.join(path)}:{of}"] = variable, path[1:], array
        return found

    def difference(
        self, run: Callable, number: int, name: str, path: tuple, gradient: np.ndarray
    ) -> tuple | None:
        """(number of a value, [(flat entry, by differences)]), or None: it is the gradient of no value the variable had."""
        largest = np.argsort(-np.abs(gradient), axis=None, kind="stable")[:SHOWN]
        for version, holder in reversed([*enumerate(self.bound[number][name])]):
            value, entries = part_of(holder, path), []
            if (
                not isinstance(value, np.ndarray)
                or value.shape != gradient.shape
                or value.dtype.kind != "f"
            ):
                continue
            for flat in largest:
                index = np.unravel_index(flat, value.shape)
                above, below = (
                    self.moved_run(run, number, name, version, path, index, step)
                    for step in (STEP, -STEP)
                )
                numeric = (above - below) / (2 * STEP)
                if abs(numeric - gradient[index]) > TOLERANCE * max(
                    abs(numeric), abs(gradient[index]), 1e-5
                ):
                    break
                entries.append((int(flat), numeric))
            else:
                return self.values.keep(value), entries
        return None

    def moved_run(
        self,
        run: Callable,
        number: int,
        name: str,
        version: int,
        path: tuple,
        index: tuple,
        step: float,
    ) -> float:
        """run(), in which a call goes on with another entry `index` after it has bound `name` for that time."""
        function, bound = self.calls[number].function, []
        code, before = (
            self.codes[function],
            itertools.count(-sum(call.function == function for call in self.calls[:number])),
        )

        def enter(frame: FrameType, event: str, argument: object) -> Callable | None:
            return line if frame.f_code is code and next(before) == 0 else None

        def line(frame: FrameType, event: str, argument: object) -> Callable | None:
            if is_new(bound, frame.f_locals.get(name)) and len(bound) > version:
                sys.settrace(None)
                frame.f_locals[name] = moved(frame.f_locals[name], path, index, step)
                return None
            return line

        return traced(enter, run)


def moved(value: object, path: tuple, index: tuple, step: float) -> object:
    """A copy of an array, or of what has it as its part `path`, with one entry moved."""
    part = part_of(value, path).copy()
    part[index] += step
    if not path:
        return part
    return (
        value._replace(**{path[0]: part}) if hasattr(value, "_replace") else value | {path[0]: part}
    )
