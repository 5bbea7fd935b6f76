"""python -m reference.<paper> --check [--case NAME]: finite differences beside the hand-written backward, tensor by tensor.

A case is a file of docs/vectors: a config, parameters, a state and three segments. Along a random direction of each tensor the
objective of rollout.py is differentiated numerically; what the paper stops is held at its value meanwhile (STOPPED). For the
first tensor that is wrong, the functions are named that its gradient comes from.
"""

import argparse
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
STEPS = (1e-5, 1e-6, 1e-7)  # of differences; smaller ones are tried because a kink of ReLU may lie inside the first
TOLERANCE, SMALLEST = 1e-5, 1e-5  # of the relative error; the magnitude that smaller gradients are compared with
FIRST = {
    "compressive": "conv-attention_reconstruction", "block_recurrent": "fixed-skip", "memformer": "all-tasks",
    "memorizing": "retrieval",
}  # fmt: skip
STOPPED = {  # {function: the arguments that are data to it}
    "compressive": {
        "remember_forward": ("h", "memory", "weights"),  # decision 2: evicted rows
        "attention_reconstruction_forward": ("p", "h"),  # decision 10
    },
    "memorizing": {"retrieval_forward": ("memory_keys", "memory_values")},  # decision 10
}


class Case(NamedTuple):
    """What a file of docs/vectors gives."""

    reference: ModuleType
    config: object
    params: dict
    state: tuple
    segments: list


def case_names(paper: str) -> list[str]:
    """The cases of a paper, the one that is checked by default first."""
    names = sorted(path.stem for path in (VECTORS / paper).glob("*.safetensors"))
    return sorted(names, key=lambda name: name != FIRST.get(paper, "mean"))


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
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(metadata["config"]).items()}
    config = reference.Config(**fields)
    params = below(rows, "given/param/")
    state = reference.initial_state(params, config, len(rows["given/0/starts"]))._replace(**below(rows, "given/state/"))
    count = 1 + max(int(key.split("/")[1]) for key in rows if key.startswith("given/") and key.split("/")[1].isdigit())
    return Case(reference, config, params, state, [segment_of(reference, below(rows, f"given/{k}/")) for k in range(count)])


def below(rows: dict, prefix: str) -> dict:
    """The rows whose names begin with prefix, by their names without it."""
    return {name[len(prefix) :]: row for name, row in rows.items() if name.startswith(prefix)}


def segment_of(reference: ModuleType, rows: dict) -> Segment:
    """A segment from its arrays."""
    task = reference.Task(**below(rows, "task.")) if "task.kind" in rows else None
    return Segment(rows["tokens"], rows["targets"], rows["scored"], rows["starts"], task)


class Held:
    """Calls functions with what is stopped at the values that it had at the first run, so that differences do not pass it."""

    def __init__(self, case: Case):
        self.case, self.values, self.calls = case, {}, {}

    def __call__(self, function: Callable, names: tuple) -> Callable:
        """The function with its arguments of these names held, and the compressed memory that it returns."""
        signature = inspect.signature(function)

        def holding(*arguments):
            number = self.calls[function] = self.calls.get(function, -1) + 1
            given = signature.bind(*arguments).arguments
            for name in names:
                given[name] = self.values.setdefault((function, number, name), given[name])
            result = function(**given)
            if function.__name__ != "remember_forward" or self.case.config.compression_loss == "bptt":
                return result
            memory, compressed, *rest = result  # the task loss does not train the compression
            return memory, self.values.setdefault((function, number, "compressed"), compressed), *rest

        return holding

    def objective(self, params: dict, state: tuple) -> float:
        """The objective of the case's segments."""
        self.calls = {}
        return float(rollout_forward(self.case.reference, params, self.case.config, self.case.segments, state)[0]["objective"])


@contextlib.contextmanager
def holding_what_is_stopped(case: Case) -> Iterator[Held]:
    """Inside the block the reference's functions hold what is stopped."""
    held, reference = Held(case), case.reference
    stopped = STOPPED.get(reference.__name__.rpartition(".")[2], {})
    before = {name: getattr(reference, name) for name in stopped}
    auxiliary = dict(getattr(reference, "AUXILIARY", {}))
    for name, names in stopped.items():
        setattr(reference, name, held(before[name], names))
        for loss, (forward, backward) in auxiliary.items():
            if forward is before[name]:
                reference.AUXILIARY[loss] = (getattr(reference, name), backward)
    try:
        yield held
    finally:
        for name, function in before.items():
            setattr(reference, name, function)
        if auxiliary:
            reference.AUXILIARY.update(auxiliary)


def differentiable(params: dict, state: tuple) -> dict:
    """{name of the vectors: array} of all that has a gradient."""
    fields = {f"grad_state/{name}": field for name, field in state._asdict().items() if field.dtype.kind == "f" and field.size}
    return {f"grad/{name}": value for name, value in params.items()} | fields


def moved(case: Case, name: str, change: np.ndarray) -> tuple[dict, tuple]:
    """The parameters and the state of a case, with one of them changed."""
    head, _, rest = name.partition("/")
    if head == "grad":
        return case.params | {rest: case.params[rest] + change}, case.state
    return case.params, case.state._replace(**{rest: getattr(case.state, rest) + change})


class Call(NamedTuple):
    """A call of a backward function, with the names of the gradients that it returned and the calls inside it."""

    function: str
    line: int
    names: set
    inside: list


def names_of_gradients(result: object) -> set:
    """The keys of the dicts that a backward function returned."""
    parts = result if isinstance(result, tuple) else (result,)
    return {name for part in parts if isinstance(part, dict) for name, value in part.items() if np.any(value)}


class Calls:
    """Inside the block, records which functions of a reference return which gradients."""

    def __init__(self, reference: ModuleType):
        self.file, self.stack = reference.__file__, [Call("", 0, set(), [])]

    def __call__(self, frame, event, result):
        """What sys.setprofile calls."""
        code = frame.f_code
        if code.co_filename != self.file or not code.co_name.endswith("backward"):
            return
        if event == "call":
            self.stack.append(Call(code.co_name, code.co_firstlineno, set(), []))
            self.stack[-2].inside.append(self.stack[-1])
        elif event == "return":
            self.stack.pop().names.update(names_of_gradients(result))

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def path(self, name: str) -> list[Call]:
        """From the whole backward down to the function that makes the gradient of a parameter."""
        found, calls, wanted = [], self.stack[0].inside, name
        while True:
            matches = [(call, end) for call in calls for end in call.names if f".{wanted}".endswith(f".{end}")]
            if not matches:
                return found
            call, wanted = max(matches, key=lambda match: len(match[1]))  # scale is in many, norm.scale in few
            found.append(call)
            calls = call.inside


def gradients_of(case: Case) -> tuple[dict, Calls]:
    """({name: gradient} by hand, the calls that made them)."""
    _, caches, _ = rollout_forward(case.reference, case.params, case.config, case.segments, case.state)
    with Calls(case.reference) as calls:
        grads, dstate = rollout_backward(case.reference, case.params, case.config, caches)
    return {f"grad/{name}": grad for name, grad in grads.items()} | differentiable({}, dstate), calls


def slope(held: Held, name: str, step: float, direction: np.ndarray) -> float:
    """The objective's derivative along a direction of one tensor, by a central difference."""
    above, below = (held.objective(*moved(held.case, name, sign * step * direction)) for sign in (1, -1))
    return (above - below) / (2 * step)


def errors_of(case: Case, grads: dict, rng: np.random.Generator) -> dict:
    """{name: (derivative by hand, by differences, relative error)} along a random direction of each tensor."""
    found = {}
    with holding_what_is_stopped(case) as held:
        held.objective(case.params, case.state)  # the values at which what is stopped is held
        values = differentiable(case.params, case.state)
        for name in in_order([*values], []):
            direction = rng.standard_normal(values[name].shape)
            by_hand, tried = float((grads[name] * direction).sum()), []
            for step in STEPS:
                numeric = slope(held, name, step, direction)
                tried.append((abs(by_hand - numeric) / max(abs(by_hand), abs(numeric), SMALLEST), numeric))
                if tried[-1][0] <= TOLERANCE:
                    break
            error, numeric = min(tried)
            found[name] = by_hand, numeric, error
    return found


def advice(case: Case, name: str, calls: Calls) -> str:
    """Where to look if the gradient of this name is wrong."""
    path = calls.path(name.partition("/")[2]) if name.startswith("grad/") else []
    file = Path(case.reference.__file__).name
    if not path:
        return f"look at backward in reference/{file}, and at what each layer returns for the incoming state"
    *callers, last = path
    through = f", called by {', '.join(call.function for call in reversed(callers))}" if callers else ""
    return f"look at {last.function} (reference/{file}:{last.line}){through}"


def check(paper: str, name: str) -> bool:
    """Print the table of a case; returns whether all gradients are right."""
    case = read_case(paper, name)
    grads, calls = gradients_of(case)
    print(f"{paper}, case {name}: {len(case.segments)} segments, {len(case.state[0])} lanes")
    print(f"{'gradient of the objective':<52}{'shape':<10} by hand      differences  relative error")
    errors = errors_of(case, grads, np.random.default_rng(0))
    for row, (by_hand, numeric, error) in errors.items():
        shape = "x".join(map(str, grads[row].shape))
        print(f"{row:<52}{shape:<10} {by_hand:+.6e} {numeric:+.6e} {error:.1e}{'' if error <= TOLERANCE else '  WRONG'}")
    wrong = [row for row, (_, _, error) in errors.items() if not error <= TOLERANCE]
    if wrong:
        print(f"{len(wrong)} of {len(errors)} wrong; first in the order of the backward pass: {wrong[0]}")
        print(advice(case, wrong[0], calls))
    else:
        print(f"Largest relative error {max(error for _, _, error in errors.values()):.1e}: all are the objective's derivatives.")
    return not wrong


def parser_of(paper: str) -> argparse.ArgumentParser:
    """The command line of a reference."""
    names = case_names(paper)
    parser = argparse.ArgumentParser(
        prog=f"python -m reference.{paper}", description="Without options: the demonstration.",
        epilog=textwrap.fill(f"cases: {', '.join(names)}", 80, break_on_hyphens=False),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", required=True, help="compare gradients with finite differences")
    first = names[0] if names else ""
    parser.add_argument("--case", metavar="NAME", default=first, help=f"the case to check (default {first})")
    return parser


def main(paper: str, argv: list | None = None) -> int:
    """Run the command line of a reference; returns the exit code."""
    options = parser_of(paper).parse_args(argv)
    return exit_code(f"reference.{paper}", lambda: check(paper, options.case))


if __name__ == "__main__":  # run by a reference, which puts its name in front of its own arguments
    sys.exit(main(sys.argv[1], sys.argv[2:]))
