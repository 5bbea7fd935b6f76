"""python -m reference.<paper> --check [--case NAME]: finite differences beside the hand-written backward, tensor by tensor.

A case is a file of docs/vectors: a config, parameters, a state and three segments. Along a random direction of each tensor the
objective of rollout.py is differentiated numerically; what the paper stops is held at its value meanwhile. A reference says what
that is by `stopped(config)`: {function: the arguments that are data to it; "return.1" is its second result}. For the first
tensor that is wrong, the functions are named that its gradient comes from.
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
STEPS = (
    1e-5,
    1e-6,
    1e-7,
)  # of differences; smaller ones are tried because a kink of ReLU may lie inside the first
TOLERANCE, SMALLEST = (
    1e-5,
    1e-5,
)  # of the relative error; the magnitude that smaller gradients are compared with


class Case(NamedTuple):
    """What a file of docs/vectors gives."""

    reference: ModuleType
    config: object
    params: dict
    state: tuple
    segments: list


def case_names(paper: str) -> list[str]:
    """The cases of a paper."""
    return sorted(path.stem for path in (VECTORS / paper).glob("*.safetensors"))


def default_case(paper: str) -> str:
    """The first case whose file has what a layer puts out, or else the first."""
    cases = ((name, load(VECTORS / paper / f"{name}.safetensors")[0]) for name in case_names(paper))
    found = (name for name, rows in cases if any(row.endswith("layer_output") for row in rows))
    return next(found, next(iter(case_names(paper)), ""))


def read_case(paper: str, name: str) -> Case:
    """A case; raises CheckError if there is none of that name."""
    names = case_names(paper)
    if not names:
        raise CheckError(f"{VECTORS / paper} has no cases; run this in a clone, which has them")
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise CheckError(f"--case {name} is none of {', '.join(names)} (nearest: {nearest})")
    rows, metadata = load(VECTORS / paper / f"{name}.safetensors")
    reference = importlib.import_module(f"reference.{paper}")
    fields = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in json.loads(metadata["config"]).items()
    }
    config, params = reference.Config(**fields), below(rows, "given/param/")
    state = reference.initial_state(params, config, len(rows["given/0/starts"]))._replace(
        **below(rows, "given/state/")
    )
    count = sum(row.startswith("given/") and row.endswith("/tokens") for row in rows)
    return Case(
        reference,
        config,
        params,
        state,
        [segment_of(reference, below(rows, f"given/{k}/")) for k in range(count)],
    )


def below(rows: dict, prefix: str) -> dict:
    """The rows whose names begin with prefix, by their names without it."""
    return {name[len(prefix) :]: row for name, row in rows.items() if name.startswith(prefix)}


def segment_of(reference: ModuleType, rows: dict) -> Segment:
    """A segment from its arrays."""
    task = reference.Task(**below(rows, "task.")) if "task.kind" in rows else None
    return Segment(rows["tokens"], rows["targets"], rows["scored"], rows["starts"], task)


def inputs_of(params: dict, state: tuple) -> dict:
    """{name of the vectors: array} of all that has a gradient."""
    fields = {
        f"grad_state/{name}": field
        for name, field in state._asdict().items()
        if field.dtype.kind == "f" and field.size
    }
    return {f"grad/{name}": value for name, value in params.items()} | fields


@contextlib.contextmanager
def holding_what_is_stopped(case: Case) -> Iterator[Callable]:
    """Inside the block: the objective as a function of `inputs_of`, with what is stopped as it was in its first call."""
    values, calls, reference = {}, collections.Counter(), case.reference

    def holding(function: Callable, names: tuple) -> Callable:
        def called(*arguments):
            calls[function] += 1
            given = inspect.signature(function).bind(*arguments).arguments
            for name in given.keys() & {*names}:
                given[name] = values.setdefault((function, calls[function], name), given[name])
            result = function(**given)
            if "return.1" not in names:
                return result
            return (
                result[0],
                values.setdefault((function, calls[function], "return.1"), result[1]),
                *result[2:],
            )

        return called

    def objective(inputs: dict) -> float:
        calls.clear()
        state = case.state._replace(**below(inputs, "grad_state/"))
        return float(
            rollout_forward(reference, below(inputs, "grad/"), case.config, case.segments, state)[
                0
            ]["objective"]
        )

    before, auxiliary = dict(vars(reference)), dict(getattr(reference, "AUXILIARY", {}))
    stopped = reference.stopped(case.config) if hasattr(reference, "stopped") else {}
    held = {name: holding(before[name], names) for name, names in stopped.items()}
    in_tables = {before[name]: function for name, function in held.items()}
    try:
        vars(reference).update(held)
        for loss, (forward, backward) in auxiliary.items():
            reference.AUXILIARY[loss] = in_tables.get(forward, forward), backward
        yield objective
    finally:
        vars(reference).update(before)
        getattr(reference, "AUXILIARY", {}).update(auxiliary)


class Call(NamedTuple):
    """A call of a backward function, with the names of the gradients that it returned and the calls inside it."""

    function: str
    line: int
    names: set
    inside: list


@contextlib.contextmanager
def recorded_calls(reference: ModuleType) -> Iterator[list[Call]]:
    """Inside the block, a list that grows by the calls of the reference's backward functions."""
    stack = [Call("", 0, set(), [])]

    def profile(frame, event, result):
        code = frame.f_code
        if code.co_filename != reference.__file__ or not code.co_name.endswith("backward"):
            return
        if event == "call":
            stack.append(Call(code.co_name, code.co_firstlineno, set(), []))
            stack[-2].inside.append(stack[-1])
        elif event == "return":
            parts = result if isinstance(result, tuple) else (result,)
            found = {
                name
                for part in parts
                if isinstance(part, dict)
                for name, value in part.items()
                if np.any(value)
            }
            stack.pop().names.update(found)

    sys.setprofile(profile)
    try:
        yield stack[0].inside
    finally:
        sys.setprofile(None)


def path_to(calls: list[Call], name: str) -> list[Call]:
    """From the whole backward down to the function that makes the gradient of a parameter."""
    matches = [
        (call, end) for call in calls for end in call.names if f".{name}".endswith(f".{end}")
    ]
    if not matches:
        return []
    call, end = max(matches, key=lambda match: len(match[1]))  # scale is in many, norm.scale in few
    return [call, *path_to(call.inside, end)]


def gradients_of(case: Case) -> tuple[dict, list[Call]]:
    """({name: gradient} by hand, the calls that made them)."""
    _, caches, _ = rollout_forward(
        case.reference, case.params, case.config, case.segments, case.state
    )
    with recorded_calls(case.reference) as calls:
        grads, dstate = rollout_backward(case.reference, case.params, case.config, caches)
    return inputs_of(grads, dstate), calls


def errors_of(case: Case, grads: dict, rng: np.random.Generator) -> dict:
    """{name: (derivative by hand, by differences, relative error)} along a random direction of each tensor."""
    found, inputs = {}, inputs_of(case.params, case.state)
    with holding_what_is_stopped(case) as objective:
        objective(inputs)  # the values at which what is stopped is held
        for name in in_order([*inputs], []):
            direction = rng.standard_normal(inputs[name].shape)
            by_hand, tried = float((grads[name] * direction).sum()), []
            for step in STEPS:
                above, under = (
                    objective(inputs | {name: inputs[name] + sign * step * direction})
                    for sign in (1, -1)
                )
                numeric = (above - under) / (2 * step)
                tried.append(
                    (abs(by_hand - numeric) / max(abs(by_hand), abs(numeric), SMALLEST), numeric)
                )
                if tried[-1][0] <= TOLERANCE:
                    break
            error, numeric = min(tried)
            found[name] = by_hand, numeric, error
    return found


def advice(case: Case, name: str, calls: list[Call]) -> str:
    """Where to look if the gradient of this name is wrong."""
    path = path_to(calls, name.partition("/")[2]) if name.startswith("grad/") else []
    file = Path(case.reference.__file__).name
    if not path:
        return f"look at backward in reference/{file}, and at what each layer returns for the incoming state"
    *callers, last = path
    through = (
        f", called by {', '.join(call.function for call in reversed(callers))}" if callers else ""
    )
    return f"look at {last.function} (reference/{file}:{last.line}){through}"


def check(paper: str, name: str) -> bool:
    """Print the table of a case; returns whether all gradients are right."""
    case = read_case(paper, name)
    grads, calls = gradients_of(case)
    print(f"{paper}, case {name}: {len(case.segments)} segments, {len(case.state[0])} lanes")
    print(
        f"{'gradient of the objective':<52}{'shape':<10} by hand      differences  relative error"
    )
    errors = errors_of(case, grads, np.random.default_rng(0))
    for row, (by_hand, numeric, error) in errors.items():
        shape = "x".join(map(str, grads[row].shape))
        print(
            f"{row:<52}{shape:<10} {by_hand:+.6e} {numeric:+.6e} {error:.1e}{'' if error <= TOLERANCE else '  WRONG'}"
        )
    wrong = [row for row, (_, _, error) in errors.items() if not error <= TOLERANCE]
    if wrong:
        print(
            f"{len(wrong)} of {len(errors)} wrong; first in the order of the backward pass: {wrong[0]}"
        )
        print(advice(case, wrong[0], calls))
    else:
        print(
            f"Largest relative error {max(error for _, _, error in errors.values()):.1e}: all are the objective's derivatives."
        )
    return not wrong


def parser_of(paper: str) -> argparse.ArgumentParser:
    """The command line of a reference."""
    cases, first = (
        textwrap.fill(f"cases: {', '.join(case_names(paper))}", 80, break_on_hyphens=False),
        default_case(paper),
    )
    words, shape = "Without options: the demonstration.", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"python -m reference.{paper}", description=words, epilog=cases, formatter_class=shape
    )
    parser.add_argument(
        "--check",
        action="store_true",
        required=True,
        help="compare gradients with finite differences",
    )
    parser.add_argument(
        "--case", metavar="NAME", default=first, help=f"the case to check (default {first})"
    )
    return parser


def main(paper: str, argv: list | None = None) -> int:
    """Run the command line of a reference; returns the exit code."""
    return exit_code(
        f"reference.{paper}", lambda: check(paper, parser_of(paper).parse_args(argv).case)
    )


if __name__ == "__main__":  # run by a reference, which puts its name in front of its own arguments
    sys.exit(main(sys.argv[1], sys.argv[2:]))
