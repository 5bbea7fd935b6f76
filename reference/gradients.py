"""python -m reference.<paper> --check [--case NAME]: gradients by hand beside finite differences.

A case is a file of docs/vectors: a config, parameters, a state and three segments. Along a random
direction of each tensor the objective of rollout.py is differentiated numerically; what the paper
stops is held at its value meanwhile. A reference says what that is by `stopped(config)`:
{function: the arguments that are data to it; "return.1" is its second result}. For the first tensor
that is wrong, the functions are named that its gradient comes from.
"""

import argparse
import collections
import contextlib
import difflib
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from reference.check import CheckError, exit_code, in_order, load
from reference.rollout import Segment, rollout_backward, rollout_forward

VECTORS = Path(__file__).parent.parent / "docs" / "vectors"
# Steps of the differences; smaller ones are tried because a kink of ReLU may lie inside the first
STEPS = (1e-5, 1e-6, 1e-7)
TOLERANCE = 1e-5  # of the relative error
SMALLEST = 1e-5  # the magnitude that smaller gradients are compared with


# ----------------------------------------------------------------------------
# cases
class Case(NamedTuple):
    """What a file of docs/vectors gives."""

    reference: ModuleType
    config: object
    params: dict
    state: NamedTuple
    segments: list


def path_of(paper: str, name: str) -> Path:
    """The file of a case."""
    return VECTORS / paper / f"{name}.safetensors"


def case_names(paper: str) -> list[str]:
    """The cases of a paper."""
    return sorted(path.stem for path in (VECTORS / paper).glob("*.safetensors"))


def default_case(paper: str) -> str:
    """The first case whose file has what a layer puts out, or else the first."""
    names = case_names(paper)
    for name in names:
        rows, _ = load(path_of(paper, name))
        if any(row.endswith("layer_output") for row in rows):
            return name
    return names[0] if names else ""


def read_case(paper: str, name: str) -> Case:
    """A case; raises CheckError if there is none of that name."""
    names = case_names(paper)
    if not names:
        raise CheckError(f"{VECTORS / paper} has no cases; run this in a clone, which has them")
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise CheckError(f"--case {name} is none of {', '.join(names)} (nearest: {nearest})")

    rows, metadata = load(path_of(paper, name))
    reference = importlib.import_module(f"reference.{paper}")
    config = reference.Config(**fields_of(metadata["config"]))
    params = below(rows, "given/param/")
    fresh = reference.initial_state(params, config, len(rows["given/0/starts"]))
    state = fresh._replace(**below(rows, "given/state/"))
    count = sum(row.startswith("given/") and row.endswith("/tokens") for row in rows)
    segments = [segment_of(reference, below(rows, f"given/{k}/")) for k in range(count)]
    return Case(reference, config, params, state, segments)


def fields_of(text: str) -> dict:
    """A config's fields from JSON, which has lists where they are tuples."""
    fields = json.loads(text)
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    return fields


def below(rows: dict, prefix: str) -> dict:
    """The rows whose names begin with prefix, by their names without it."""
    return {name[len(prefix) :]: row for name, row in rows.items() if name.startswith(prefix)}


def segment_of(reference: ModuleType, rows: dict) -> Segment:
    """A segment from its arrays."""
    task = reference.Task(**below(rows, "task.")) if "task.kind" in rows else None
    return Segment(rows["tokens"], rows["targets"], rows["scored"], rows["starts"], task)


def inputs_of(params: dict, state: NamedTuple) -> dict:
    """{name of the vectors: array} of all that has a gradient."""
    inputs = {f"grad/{name}": value for name, value in params.items()}
    for name, field in state._asdict().items():
        if field.dtype.kind == "f" and field.size:
            inputs[f"grad_state/{name}"] = field
    return inputs


# ----------------------------------------------------------------------------
# derivatives: by finite differences, with what is stopped held at its value, and by hand
class Holder:
    """Gives functions that repeat what is data to them, as it was in the first evaluation."""

    def __init__(self):
        self.values = {}  # {(function, number of its call, name): what is held}
        self.calls = collections.Counter()

    def begin(self):
        """Begin an evaluation: the next call of each function is its first."""
        self.calls.clear()

    def holding(self, function: Callable, names: tuple) -> Callable:
        """The function with the arguments and results of these names held."""
        signature = inspect.signature(function)

        def called(*arguments):
            self.calls[function] += 1
            call = (function, self.calls[function])
            given = signature.bind(*arguments).arguments
            for name in names:
                if name in given:
                    given[name] = self.values.setdefault((*call, name), given[name])
            result = function(**given)
            if "return.1" not in names:
                return result
            first, second, *rest = result
            second = self.values.setdefault((*call, "return.1"), second)
            return (first, second, *rest)

        return called


@contextlib.contextmanager
def holding_what_is_stopped(case: Case) -> Iterator[Callable]:
    """Inside the block: the objective as a function of `inputs_of`.

    What is stopped is as it was in the first call.
    """
    reference = case.reference
    holder = Holder()

    def objective(inputs: dict) -> float:
        holder.begin()
        params = below(inputs, "grad/")
        state = case.state._replace(**below(inputs, "grad_state/"))
        rows, _, _ = rollout_forward(reference, params, case.config, case.segments, state)
        return float(rows["objective"])

    before = dict(vars(reference))
    losses = getattr(reference, "AUXILIARY", {})  # which also knows functions
    losses_before = dict(losses)
    stopped = reference.stopped(case.config) if hasattr(reference, "stopped") else {}
    held = {name: holder.holding(before[name], names) for name, names in stopped.items()}
    instead_of = {before[name]: function for name, function in held.items()}
    try:
        vars(reference).update(held)
        for loss, (forward, backward) in losses_before.items():
            losses[loss] = (instead_of.get(forward, forward), backward)
        yield objective
    finally:
        vars(reference).update(before)
        losses.update(losses_before)


def errors_of(case: Case, grads: dict, rng: np.random.Generator) -> dict:
    """{name: (derivative by hand, by differences, relative error)}.

    The derivatives are along a random direction of each tensor.
    """
    found = {}
    inputs = inputs_of(case.params, case.state)
    with holding_what_is_stopped(case) as objective:
        objective(inputs)  # the values at which what is stopped is held
        for name in in_order([*inputs], []):
            direction = rng.standard_normal(inputs[name].shape)
            by_hand = float((grads[name] * direction).sum())
            numeric, error = nearest_difference(objective, inputs, name, direction, by_hand)
            found[name] = (by_hand, numeric, error)
    return found


def nearest_difference(
    objective: Callable, inputs: dict, name: str, direction: np.ndarray, by_hand: float
) -> tuple[float, float]:
    """(derivative along the direction by differences, relative error of the one by hand).

    Of the steps it takes the first whose error is small enough, or else the best.
    """
    tried = []
    for step in STEPS:
        above = objective(inputs | {name: inputs[name] + step * direction})
        under = objective(inputs | {name: inputs[name] - step * direction})
        numeric = (above - under) / (2 * step)
        error = abs(by_hand - numeric) / max(abs(by_hand), abs(numeric), SMALLEST)
        tried.append((error, numeric))
        if error <= TOLERANCE:
            break
    error, numeric = min(tried)
    return numeric, error


# ----------------------------------------------------------------------------
# where to look: the backward functions that a gradient comes from
class Call(NamedTuple):
    """A call of a backward function, the names of the gradients it returned, the calls inside."""

    function: str
    line: int
    names: set
    inside: list


@contextlib.contextmanager
def recorded_calls(reference: ModuleType) -> Iterator[list[Call]]:
    """Inside the block, a list that grows by the calls of the reference's backward functions."""
    outermost = Call("", 0, set(), [])
    stack = [outermost]

    def profile(frame, event, result):
        code = frame.f_code
        if code.co_filename != reference.__file__ or not code.co_name.endswith("backward"):
            return
        if event == "call":
            call = Call(code.co_name, code.co_firstlineno, set(), [])
            stack[-1].inside.append(call)
            stack.append(call)
        elif event == "return":
            stack.pop().names.update(gradient_names(result))

    sys.setprofile(profile)
    try:
        yield outermost.inside
    finally:
        sys.setprofile(None)


def gradient_names(result: object) -> set:
    """Names of the gradients that are not all zero, in what a backward function returned."""
    parts = result if isinstance(result, tuple) else (result,)
    names = set()
    for part in parts:
        if isinstance(part, dict):
            names.update(name for name, value in part.items() if np.any(value))
    return names


def path_to(calls: list[Call], name: str) -> list[Call]:
    """From the whole backward down to the function that makes the gradient of a parameter."""
    best = None
    known = ""  # the end of the name that the best call knows: scale is in many, norm.scale in few
    for call in calls:
        for end in call.names:
            if f".{name}".endswith(f".{end}") and len(end) > len(known):
                best = call
                known = end
    if best is None:
        return []
    return [best, *path_to(best.inside, known)]


def gradients_of(case: Case) -> tuple[dict, list[Call]]:
    """({name: gradient} by hand, the calls that made them)."""
    reference, config, params, state, segments = case
    _, caches, _ = rollout_forward(reference, params, config, segments, state)
    with recorded_calls(reference) as calls:
        grads, dstate = rollout_backward(reference, params, config, caches)
    return inputs_of(grads, dstate), calls


def advice(case: Case, name: str, calls: list[Call]) -> str:
    """Where to look if the gradient of this name is wrong."""
    kind, _, parameter = name.partition("/")
    path = path_to(calls, parameter) if kind == "grad" else []
    file = f"reference/{Path(inspect.getfile(case.reference)).name}"
    if not path:
        return f"look at backward in {file}, and at what each layer returns for the incoming state"
    *callers, last = path
    words = f"look at {last.function} ({file}:{last.line})"
    if callers:
        words += f", called by {', '.join(call.function for call in reversed(callers))}"
    return words


# ----------------------------------------------------------------------------
# the command line
def check(paper: str, name: str) -> bool:
    """Print the table of a case; returns whether all gradients are right."""
    case = read_case(paper, name)
    grads, calls = gradients_of(case)
    print(f"{paper}, case {name}: {len(case.segments)} segments, {len(case.state[0])} lanes")
    first_column = f"{'gradient of the objective':<52}"
    print(f"{first_column}{'shape':<10} by hand      differences  relative error")

    errors = errors_of(case, grads, np.random.default_rng(0))
    wrong = [row for row, (_, _, error) in errors.items() if not error <= TOLERANCE]
    for row, (by_hand, numeric, error) in errors.items():
        shape = "x".join(map(str, grads[row].shape))
        mark = "  WRONG" if row in wrong else ""
        print(f"{row:<52}{shape:<10} {by_hand:+.6e} {numeric:+.6e} {error:.1e}{mark}")

    if wrong:
        first = f"first in the order of the backward pass: {wrong[0]}"
        print(f"{len(wrong)} of {len(errors)} wrong; {first}")
        print(advice(case, wrong[0], calls))
    else:
        largest = max(error for _, _, error in errors.values())
        print(f"Largest relative error {largest:.1e}: all are the objective's derivatives.")
    return not wrong


def parser_of(paper: str) -> argparse.ArgumentParser:
    """The command line of a reference."""
    cases = f"cases: {', '.join(case_names(paper))}"
    parser = argparse.ArgumentParser(
        f"python -m reference.{paper}",
        description="Without options: the demonstration.",
        epilog=textwrap.fill(cases, 80, break_on_hyphens=False),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    differences = "compare gradients with finite differences"
    parser.add_argument("--check", action="store_true", required=True, help=differences)
    first = default_case(paper)
    which = f"the case to check (default {first})"
    parser.add_argument("--case", metavar="NAME", default=first, help=which)
    return parser


def main(paper: str, argv: list | None = None) -> int:
    """Run the command line of a reference; returns the exit code."""

    def work() -> bool:
        options = parser_of(paper).parse_args(argv)
        return check(paper, options.case)

    return exit_code(f"reference.{paper}", work)


if __name__ == "__main__":  # run by a reference, which puts its name in front of its own arguments
    sys.exit(main(sys.argv[1], sys.argv[2:]))
