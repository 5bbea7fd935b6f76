"""python -m reference.<paper> [--check] [--case NAME]: gradients beside finite differences.

A case is a file of docs/vectors: a config, parameters, a state and three segments. Along a random
direction of each tensor the objective of rollout.py is differentiated numerically; values whose
gradient the paper stops are held fixed meanwhile. A reference names them by `stopped(config)`:
{function: the arguments that it detaches; "return.1" is its second result}. If a tensor is wrong,
every backward function is checked by itself, on random numbers, and the guilty one is named.
"""

import argparse
import contextlib
import difflib
import importlib
import inspect
import json
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from reference.check import SEGMENTS, CheckError, exit_code, load
from reference.demonstration import demonstrate
from reference.memformer import subtree
from reference.rollout import Segment, rollout_backward, rollout_forward

VECTORS = Path(__file__).parent.parent / "docs" / "vectors"
# Steps of the differences; smaller ones are tried because a kink of ReLU may lie inside the first
STEPS = (1e-5, 1e-6, 1e-7)
TOLERANCE = 1e-5  # of the relative error
SMALLEST = 1e-5  # the magnitude that smaller gradients are compared with


# ----------------------------------------------------------------------------
# cases
class Case(NamedTuple):
    """A file of docs/vectors."""

    reference: ModuleType
    config: Any
    params: dict
    state: NamedTuple
    segments: list


def path_of(paper: str, name: str) -> Path:
    """The file of a case."""
    return VECTORS / paper / f"{name}.safetensors"


def case_names(paper: str) -> list[str]:
    """The cases of a paper."""
    return sorted(path.stem for path in (VECTORS / paper).glob("*.safetensors"))


def read_case(paper: str, name: str) -> Case:
    """Read a case. Raises CheckError if the paper has no case of this name."""
    names = case_names(paper)
    if not names:
        raise CheckError(f"{VECTORS / paper} has no cases; run this in a clone, which has them")
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise CheckError(f"--case {name} is none of {', '.join(names)} (nearest: {nearest})")

    rows, metadata = load(path_of(paper, name))
    reference = importlib.import_module(f"reference.{paper}")
    config = reference.Config(**fields_of(metadata["config"]))
    params = subtree(rows, "given/param/")
    fresh = reference.initial_state(params, config, len(rows["given/0/starts"]))
    state = fresh._replace(**subtree(rows, "given/state/"))
    segments = [segment_of(reference, subtree(rows, f"given/{k}/")) for k in range(SEGMENTS)]
    return Case(reference, config, params, state, segments)


def fields_of(text: str) -> dict:
    """A config's fields from JSON, whose lists become tuples."""
    fields = json.loads(text)
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def segment_of(reference: ModuleType, rows: dict) -> Segment:
    """A segment from its arrays."""
    task = None
    if "task.kind" in rows:
        task = function_of(reference, "Task")(**subtree(rows, "task."))
    return Segment(rows["tokens"], rows["targets"], rows["scored"], rows["starts"], task)


def inputs_of(params: dict, state: NamedTuple) -> dict:
    """{name in the vectors: array} of all that has a gradient."""
    inputs = {f"grad/{name}": value for name, value in params.items()}
    for name, field in state._asdict().items():
        if field.dtype.kind == "f" and field.size:
            inputs[f"grad_state/{name}"] = field
    return inputs


# ----------------------------------------------------------------------------
# derivatives: by finite differences, with what is stopped held at its value, and by hand
def modules_of(reference: ModuleType) -> list[ModuleType]:
    """The modules that a paper's functions stand in: its file, and its variants if it has any."""
    if not hasattr(reference, "operations_of"):
        return [reference]
    paper = reference.__name__.rpartition(".")[2]
    # By its own importlib: a changed copy of a file has a changed copy of its variants
    return [reference, reference.importlib.import_module(f"reference.variants.{paper}")]


def module_of(reference: ModuleType, name: str) -> ModuleType:
    """The module of a paper that has a function or class; the paper's file if none has."""
    return next((each for each in modules_of(reference) if hasattr(each, name)), reference)


def function_of(reference: ModuleType, name: str) -> Callable:
    """A paper's function, from its file or its variants."""
    return getattr(module_of(reference, name), name)


def stopped(case: Case) -> dict:
    """{function: the arguments that it detaches}."""
    return getattr(case.reference, "stopped", lambda config: {})(case.config)


def holding(function: Callable, names: tuple, values: dict, counts: Counter) -> Callable:
    """Wrap function so that these arguments and results keep the values of the first evaluation.

    values: {(function, number of the call): {name: held value}}; counts: its calls so far.
    """
    signature = inspect.signature(function)

    def called(*arguments):
        counts[function] += 1
        first = values.setdefault((function, counts[function]), {})
        given = signature.bind(*arguments).arguments
        for name in given.keys() & {*names}:
            given[name] = first.setdefault(name, given[name])
        result = function(**given)
        if "return.1" not in names:
            return result
        one, two, *rest = result
        return (one, first.setdefault("return.1", two), *rest)

    return called


@contextlib.contextmanager
def held_functions(case: Case) -> Iterator[tuple]:
    """Context manager: inside, a reference's functions get the first evaluation's stopped values.

    Yields (held values, counts of calls); clear the counts before each evaluation.
    """
    values = {}
    counts = Counter()
    with contextlib.ExitStack() as restored:
        for name, names in stopped(case).items():
            module = module_of(case.reference, name)
            function = getattr(module, name)
            restored.callback(setattr, module, name, function)
            setattr(module, name, holding(function, names, values, counts))
        yield values, counts


@contextlib.contextmanager
def holding_what_is_stopped(case: Case) -> Iterator[Callable]:
    """Inside the block: the objective, a function of what `inputs_of` returns.

    What is stopped keeps the values that it has in the case itself.
    """
    with held_functions(case) as (_, counts):

        def objective(inputs: dict) -> float:
            counts.clear()
            params = subtree(inputs, "grad/")
            state = case.state._replace(**subtree(inputs, "grad_state/"))
            rows, _, _ = rollout_forward(case.reference, params, case.config, case.segments, state)
            return float(rows["objective"])

        objective(inputs_of(case.params, case.state))
        yield objective


def errors_of(case: Case, grads: dict, rng: np.random.Generator) -> dict:
    """{name: relative error} of the derivative along a random direction of each tensor."""
    found = {}
    inputs = inputs_of(case.params, case.state)
    with holding_what_is_stopped(case) as objective:
        for name in inputs:
            direction = rng.standard_normal(inputs[name].shape)
            *_, found[name] = compared(objective, inputs, name, grads[name], direction)
    return found


def compared(
    objective: Callable, inputs: dict, name: Any, gradient: np.ndarray, direction: np.ndarray
) -> tuple[float, float, float]:
    """(derivative along a direction by hand, by differences, relative error).

    It takes the first step whose error is small enough, or else the best one.
    """
    by_hand = float((gradient * direction).sum())
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
    return by_hand, numeric, error


def worst_entry(case: Case, name: str, gradient: np.ndarray) -> tuple:
    """(difference, index, by hand, by differences) of the worst entry of a tensor."""
    inputs = inputs_of(case.params, case.state)
    found = []
    with holding_what_is_stopped(case) as objective:
        for index in np.ndindex(gradient.shape):
            one = np.zeros(gradient.shape)
            one[index] = 1.0
            by_hand, numeric, _ = compared(objective, inputs, name, gradient, one)
            found.append((abs(by_hand - numeric), index, by_hand, numeric))
    return max(found)


# ----------------------------------------------------------------------------
# who is guilty: each backward function by itself, on random numbers
class Calls:
    """What a rollout called: the arguments of forward functions, and who called whom backwards."""

    def __init__(self, reference: ModuleType):
        self.files = {module.__file__ for module in modules_of(reference)}
        self.given = defaultdict(dict)  # {forward function: {their shapes: arguments}}
        self.inside = defaultdict(set)  # {backward function: those that it called}
        self.places = {}  # {backward function: its module and line}, in the order of returning
        self.stack = [""]

    def notice(self, frame: FrameType, event: str, result: object) -> None:
        """The profile function."""
        code = frame.f_code
        name = code.co_name
        if code.co_filename not in self.files:
            return
        if name.endswith("forward") and event == "call":
            given = dict(frame.f_locals)  # of a call that begins: its arguments
            shapes = str([(key, array.shape) for key, array in leaves(given)])
            self.given[name].setdefault(shapes, given)
        elif name.endswith("backward") and event == "call":
            self.inside[self.stack[-1]].add(name)
            self.stack.append(name)
        elif name.endswith("backward") and event == "return":
            self.stack.pop()
            self.places.setdefault(name, (frame.f_globals["__name__"], code.co_firstlineno))


def gradients_of(case: Case, calls: Calls | None = None) -> dict:
    """{name: gradient} by hand; `calls` notices the calls that made them."""
    reference, config, params, state, segments = case
    if calls is not None:
        sys.setprofile(calls.notice)
    try:
        _, caches, _ = rollout_forward(reference, params, config, segments, state)
        grads, dstate = rollout_backward(reference, params, config, caches)
    finally:
        sys.setprofile(None)
    return inputs_of(grads, dstate)


def mapped(value: Any, change: Callable, name: str = "") -> Any:
    """A value, in which each array of floats is replaced by change(name, array)."""
    if isinstance(value, np.ndarray | np.floating):
        return change(name, value) if value.dtype.kind == "f" else value
    if isinstance(value, dict):
        return {key: mapped(part, change, key) for key, part in value.items()}
    if isinstance(value, tuple | list):
        fields = getattr(value, "_fields", [name] * len(value))
        pairs = zip(value, fields, strict=True)
        parts = [mapped(part, change, field) for part, field in pairs]
        return getattr(value, "_make", type(value))(parts)
    return value


def leaves(value: Any) -> list[tuple[str, Any]]:
    """[(name, array)] of a value, in order."""
    found = []
    mapped(value, lambda name, array: found.append((name, array)))
    return found


def rebuilt(value: Any, arrays: Iterator) -> Any:
    """A value, whose arrays are replaced by others, in order."""
    return mapped(value, lambda name, array: next(arrays))


def random_like(value: Any, rng: np.random.Generator) -> Any:
    """A value, whose arrays are replaced by random numbers."""
    return mapped(value, lambda name, array: np.asarray(rng.standard_normal(array.shape)))


def is_right(case: Case, held: tuple, name: str, given: dict) -> bool:
    """Whether a backward function is the derivative of its forward function, on random numbers.

    Inputs have the shapes that forward was called with. Each returned array must be the gradient
    with respect to the input of its name, or to one of its shape; no parameter may be left out.
    """
    rng = np.random.default_rng(0)
    values, counts = held
    values.clear()
    forward = function_of(case.reference, forward_of(name))
    given = random_like(given, rng)
    *results, cache = forward(*given.values())

    arriving = {}  # {number of a result: its gradient}
    added_to = {}  # {argument of forward: gradient that backward adds to}
    arguments = {}
    backward = function_of(case.reference, name)
    for argument in inspect.signature(backward).parameters:
        number = len(arriving)
        if argument == "dnext_compressed":  # remember's only one: its first result is data
            number = 1
        if argument in ("config", "params"):
            arguments[argument] = given[argument]
        elif not argument.startswith("d"):
            arguments[argument] = cache
        elif number < len(results):
            arriving[number] = without_data(case, random_like(results[number], rng))
            arguments[argument] = arriving[number]
        else:
            arguments[argument] = np.zeros_like(given[argument[1:]])
            added_to[argument[1:]] = arguments[argument]

    def objective(moved: dict) -> float:
        counts.clear()
        *outs, _ = forward(*rebuilt(given, iter(moved.values())).values())
        total = 0.0
        for number, darray in arriving.items():
            for (_, out), (_, weight) in zip(leaves(outs[number]), leaves(darray), strict=True):
                total += float((out * weight).sum())
        return total

    names, arrays = zip(*leaves(given), strict=True)
    inputs = dict(enumerate(arrays))
    left_out = {name for name, _ in leaves(given.get("p", given.get("params")))}
    for name, gradient in leaves([backward(**arguments), added_to]):
        alike = [n for n, array in inputs.items() if array.shape == gradient.shape]
        of_its_name = [n for n in alike if f".{names[n]}".endswith(f".{name}")]
        possible = of_its_name or alike
        left_out -= {names[n] for n in possible}
        is_cancelled = name.endswith("key_bias") and not gradient.any()  # by softmax
        if not possible or is_cancelled:
            continue
        if not any(is_by(objective, inputs, n, gradient) for n in possible):
            return False
    unexplained = [n for n in inputs if names[n] in left_out]
    return all(is_by(objective, inputs, n, np.zeros_like(inputs[n])) for n in unexplained)


def without_data(case: Case, gradient: Any) -> Any:
    """A gradient, with zeros for the fields of a state that a function reads as data."""
    data = {argument for arguments in stopped(case).values() for argument in arguments}
    return mapped(gradient, lambda name, array: array * (name not in data))


def is_by(objective: Callable, inputs: dict, number: int, gradient: np.ndarray) -> bool:
    """Whether an array is the objective's gradient with respect to input `number`."""
    direction = np.random.default_rng([1, number]).standard_normal(gradient.shape)
    *_, error = compared(objective, inputs, number, gradient, direction)
    return error <= TOLERANCE


def forward_of(name: str) -> str:
    """The forward function of a backward function."""
    forward = name.replace("affine_key", "affine").replace("remember_bptt", "remember")
    return forward.replace("backward", "forward")


def guilty(case: Case, calls: Calls) -> list[str]:
    """The backward functions that are wrong by themselves, though all that they call are right.

    If there are none, `backward` and those that cannot be checked by themselves.
    """
    wrong = []
    unchecked = []
    with held_functions(case) as held:
        for name in calls.places:
            given = calls.given[forward_of(name)].values()
            if not given or name == "auxiliary_backward":
                unchecked.append(name)
                continue
            try:
                right = all(is_right(case, held, name, one) for one in given)
            except Exception:  # of shapes that a fault makes
                right = False
            if not right:
                wrong.append(name)
    innermost = [name for name in wrong if not calls.inside[name] & {*wrong}]
    return innermost or [*unchecked, "backward"]


# ----------------------------------------------------------------------------
# the command line
def check(paper: str, name: str) -> float:
    """Print what is found in a case, the verdict first; returns the largest relative error."""
    case = read_case(paper, name)
    calls = Calls(case.reference)
    title = f"WRONG: {paper}, case {name}:"
    try:
        grads = gradients_of(case, calls)
        errors = errors_of(case, grads, np.random.default_rng(0))
    except Exception as error:  # of names and shapes that a fault makes
        place = traceback.extract_tb(error.__traceback__)[-1]
        print(f"{title} {place.name} raises {type(error).__name__}: {error}")
        print_guilty(case, calls)
        return np.inf

    wrong = [row for row, error in errors.items() if not error <= TOLERANCE]
    if not wrong:
        largest = max(errors.values())
        print(f"{name:<40}{len(errors):>4} gradients right, relative error at most {largest:.1e}")
        return largest
    print(f"{title} {len(wrong)} of {len(errors)} gradients")
    parameters = [row for row in wrong if row.startswith("grad/")]
    candidates = parameters or wrong
    first = candidates[-1]  # the nearest to the loss
    _, index, by_hand, numeric = worst_entry(case, first, grads[first])
    both = f"{by_hand:+.6e} by hand, {numeric:+.6e} by differences"
    print(f"  {first} at {[*index]} is {both}")
    print_guilty(case, calls)
    return np.inf


def print_guilty(case: Case, calls: Calls) -> None:
    """Print the functions to look at."""
    for name in guilty(case, calls):
        module, line = calls.places[name]
        print(f"  look at {name} ({module}, line {line})")


def check_all(paper: str) -> bool:
    """Check all cases, and print how many are right; returns whether all are."""
    names = case_names(paper) or [""]  # read_case says what to do if there are none
    errors = [check(paper, name) for name in names]
    right = sum(error <= TOLERANCE for error in errors)
    if right < len(errors):
        print(f"WRONG in {len(errors) - right} of {len(errors)} cases of {paper}")
        return False
    print(f"All {right} cases of {paper} are right: relative error at most {max(errors):.1e}")
    return True


def is_published(case: Case) -> bool:
    """Whether a case's config asks for no variant: its operations are those of its reference."""
    operations = getattr(case.config, "operations", case.reference)
    return vars(operations) == vars(case.reference)


def show(paper: str) -> bool:
    """The demonstration: check the largest case without variants, and fit a model like it."""
    cases = {name: read_case(paper, name) for name in case_names(paper) or [""]}
    published = [name for name, case in cases.items() if is_published(case)]
    name = max(published, key=lambda name: len(cases[name].params))
    is_right = check(paper, name) <= TOLERANCE
    if is_right:
        config = replace(cases[name].config, vocabulary=11, width=16, feed_forward=32)
        demonstrate(cases[name].reference, config)
    return is_right


def main(paper: str, argv: list | None = None) -> int:
    """Run the command line of a reference; returns the exit code."""
    words = "Without options: the demonstration."
    parser = argparse.ArgumentParser(f"python -m reference.{paper}", description=words)
    add = parser.add_argument
    add("--check", action="store_true", help="compare gradients with finite differences")
    add("--case", metavar="NAME", help="the case to check (default: all)")
    options = parser.parse_args(argv)

    def work() -> bool:
        if options.case:
            return check(paper, options.case) <= TOLERANCE
        return check_all(paper) if options.check else show(paper)

    return exit_code(f"reference.{paper}", work)
