"""Values inside a layer for docs/vectors: local variables of a reference's functions.

tests/tools/vectors.py writes them; inner_values.txt lists them by paper, case and function.
"""

import contextlib
import importlib
import re
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reference.check import INNER
from reference.gradients import modules_of
from reference.rollout import rollout_forward, segments_backward
from reference.vectors import gradient_rows

LISTED = Path(__file__).with_name("inner_values.txt")


class Listed(NamedTuple):
    """A line of inner_values.txt."""

    calls: re.Pattern  # of "/forward[0]/layer_forward[1]", with the number of calls inside each
    names: dict  # {local variable: name}; "return.0" is the first of what a function returns
    last: bool  # the last such call counts, not the first


def inner_values(paper, case):
    """The lines of a paper and a case, forward and backward.

    Below a paper and its cases stand functions, each called by the one before it or further down,
    directly after ">", in its second call if [1], in its last one if [-1]. "<" is backward.
    """
    forward = []
    backward = []
    shown = False
    for line in LISTED.read_text().strip().splitlines():
        if not line.startswith(" "):
            of, *cases = line.split()
            is_named = any(fnmatch(case, pattern) for pattern in cases)
            shown = of == paper and is_named
        elif shown and "<" in line:
            backward.append(listed(line.replace("<", ""), "backward"))
        elif shown:
            forward.append(listed(line, "forward"))
    return forward, backward


def listed(line, direction):
    """A line, of functions whose names end with the direction."""
    functions, _, values = line.partition(": ")
    pattern = "/"
    for function in functions.split():
        name, _, number = function.lstrip(">").partition("[")
        index = r"\d+" if number in ("", "-1]") else number[:-1]
        between = "" if function.startswith(">") or pattern == "/" else "(?:.*/)?"
        pattern += rf"{between}{name}_{direction}\[{index}\]/"
    pairs = (value.rpartition("=") for value in values.split(", "))
    names = {local or own: own for local, _, own in pairs}
    return Listed(re.compile(rf"{pattern[:-1]}$"), names, "[-1]" in functions)


@contextlib.contextmanager
def noting(reference, note):
    """Inside the block: a function that makes parameters call note(name) when they are read."""
    subtree = reference.subtree

    class Noting(dict):
        prefix = ""

        def __getitem__(self, name):
            note(self.prefix + name)
            return super().__getitem__(name)

    def noting_subtree(params, prefix):
        part = Noting(subtree(params, prefix))
        part.prefix = getattr(params, "prefix", "") + prefix
        return part

    vars(reference)["subtree"] = noting_subtree
    try:
        yield Noting
    finally:
        vars(reference)["subtree"] = subtree


def part_of(values, path):
    """What a path names, None if it is missing.

    "projected.query" is values["projected"]["query"], "return.0" the first of a tuple.
    """
    for part in path.split("."):
        if values is None:
            return None
        values = values.get(part) if isinstance(values, dict) else values[int(part)]
    return values


def recorded(lines, reference, run, note):
    """{(number of the outermost call, name): array} of what lines name, while run() calls.

    The values are those of a reference's functions when they return. note(name) is called when a
    value comes to be.
    """
    files = {module.__file__ for module in modules_of(reference)}
    stack = [("", 0, Counter(), [])]
    found = {}

    def in_function(frame, event, result):
        _, number, _, wanted = stack[-1]
        values = frame.f_locals | {"return": result} if event == "return" else frame.f_locals
        for line in wanted:
            for local, name in line.names.items():
                value = part_of(values, local)
                if value is None:
                    continue
                note(name)
                key = (number, name)
                is_first = key not in found
                if event == "return" and (line.last or is_first):
                    # -inf is the score of a hidden key
                    found[key] = np.where(np.isfinite(value), value, 0)
        if event == "return":
            stack.pop()
        return in_function

    def on_call(frame, event, result):
        code = frame.f_code
        if code.co_filename not in files or code.co_name.startswith("<"):
            return None
        outer, number, inside, _ = stack[-1]
        if not outer:
            number = inside[code.co_name]
        calls = f"{outer}/{code.co_name}[{inside[code.co_name]}]"
        inside[code.co_name] += 1
        wanted = [line for line in lines if line.calls.search(calls)]
        stack.append((calls, number, Counter(), wanted))
        return in_function

    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def hidden_of(paper, config, inner):
    """{value inside a layer: mask of the query-key pairs that count}, for the values in inner.

    Where it hides a key, 0 is written. It is the right mask, if a reference was changed too.
    """
    reference = importlib.import_module(f"reference.{paper}")
    if hasattr(reference, "tile_mask"):
        mask = reference.tile_mask(getattr(config, "window", config.segment))
        return {"position_bias": mask, "similarity": mask}
    masks = {}
    if hasattr(config, "compressed_memory"):
        for name in {"scores_by_distance_shifted", "scores"} & inner.keys():
            # a layer may have fewer keys than the config's rows
            queries, keys = inner[name].shape[-2:]
            masks[name] = reference.causal_mask(queries, keys)
    return masks


def inside_of(case, paper, lines):
    """({name: array} inside a layer of segment 0, their gradients' names in backward order).

    Among these names are those of the parameters' gradients.
    """
    reference, config, params, state, segments = case
    order = {}  # a gradient's name: None

    def read():
        with noting(reference, lambda name: order.setdefault(f"grad/{name}")) as noted:
            rollout_forward(reference, noted(params), config, segments[:1], state)

    found = recorded(lines, reference, read, lambda name: order.setdefault(f"inner_grad/{name}"))
    names = dict.fromkeys(name for line in lines for name in line.names.values())
    inner = {name: found[0, name] for name in names if (0, name) in found}
    if "decoded" in inner:
        inner["decoded"] = inner["decoded"].reshape(inner["evicted"].shape)
    for name, mask in hidden_of(paper, config, inner).items():
        if name in inner:
            inner[name] = np.where(mask, inner[name], 0)
    order |= {f"grad/{name}": None for name in reversed(params)}  # and those of no tokens
    return inner, [*reversed(order)]


def rows_of(case, name, backwards=True):
    """{name: array} of all that a port should compute in a case, in the order of computation.

    Gradients of single segments are there if some inside a layer are; none if not backwards.
    """
    reference, config, params, state, segments = case
    paper = reference.__name__.split(".")[-1]
    forward, backward = inner_values(paper, name)
    inner, order = inside_of(case, paper, forward)
    computed, caches, _ = rollout_forward(reference, params, config, segments, state)
    rows = {INNER + key: value for key, value in inner.items()} | computed
    if not backwards:
        return rows

    steps = []

    def run():
        steps.extend(segments_backward(reference, params, config, caches))

    inside = recorded(backward, reference, run, lambda name: None)
    detailed = range(len(segments)) if backward else [0]
    return rows | gradient_rows(case, steps, order, inside, detailed)
