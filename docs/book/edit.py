"""A reference's function that a reader changes beside the text: what changes, and is it right?

The worker in the reader's browser runs it. A changed function stands in a copy of the paper's
files, which takes the reference's place for the length of a run.
"""

import contextlib
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

from docs.book import live
from docs.book.record import Recorder
from docs.excerpts import ROOT, definitions, excerpt, files_of
from docs.practice.tasks import blocks
from reference import gradients
from reference.rollout import rollout_forward

SHOWN = 4  # variables that changed


def opened(paper: str, function: str) -> dict:
    """The function's text, and what a reader may try: [function, sentence, its text then]."""
    file = ROOT / "reference" / f"{paper}.py"
    suggestions = []
    for mistake in blocks(Path(__file__).with_name("suggestions.txt")):
        if mistake.task == paper:
            text = excerpt(file, mistake.function).replace(mistake.old, mistake.new)
            suggestions.append([mistake.function, mistake.sentence, text])
    return {"text": excerpt(file, function), "suggestions": suggestions}


def run(paper: str, function: str, text: str) -> dict:
    """What changes with another text of a function, on the case that the chapter shows.

    "values" are [variable, the array before, after], those that changed in the first call of the
    function in which one did. "outputs" is [name, before, after, largest difference] of logits and
    the objective. "check" is the verdict on the gradients, whose first word is WRONG if one is.
    """
    before, called = outcome(paper, function)
    with standing_in(paper, function, text):
        after, called_after = outcome(paper, function)
        live.alive()
        verdict = checked(gradients.read_case(paper, gradients.case_names(paper)[0]))
    pairs = zip(called, called_after, strict=False)
    changes = (changed_values(*pair) for pair in pairs)
    values = next((values for values in changes if values), [])
    outputs = []
    for name, array in after.items():
        if name.endswith(("/logits", "objective")):
            apart = float(np.abs(array - before[name]).max())
            outputs.append([name, float(before[name].max()), float(array.max()), apart])
    return {"values": values[:SHOWN], "outputs": outputs, "check": verdict}


def changed_values(before: dict, after: dict) -> list:
    """[variable, the array before, after] of those that another text of a function changes."""
    values = []
    for name, array in after.items():
        was = before.get(name)
        if was is None or was.shape != array.shape or not np.allclose(was, array, equal_nan=True):
            values.append([name, was, array])
    return values


@contextlib.contextmanager
def standing_in(paper: str, function: str, text: str) -> Iterator[None]:
    """Inside the block reference.PAPER and its variants are copies with another text in them."""
    file = ROOT / "reference" / f"{paper}.py"
    names = [f"reference.{paper}", f"reference.variants.{paper}"]
    before = {name: importlib.import_module(name) for name in names[: len(files_of(file))]}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, path in zip(before, files_of(file), strict=True):
                changed = path.read_text(encoding="utf-8")
                if definitions(file)[function].file == path:
                    changed = changed.replace(excerpt(file, function), text.rstrip() + "\n")
                copy = Path(folder) / path.relative_to(ROOT / "reference")
                copy.parent.mkdir(exist_ok=True)
                copy.write_text(changed, encoding="utf-8")
                spec = importlib.util.spec_from_file_location(name, copy)
                module = importlib.util.module_from_spec(spec)
                import_as(name, module)
                spec.loader.exec_module(module)
            yield
        finally:
            for name, module in before.items():
                import_as(name, module)


def import_as(name: str, module: ModuleType) -> None:
    """Let an import of a name find a module."""
    package, _, own = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[package], own, module)


def checked(case: gradients.Case) -> str:
    """The verdict on all gradients at once, along one random direction; and who is guilty.

    `--check` on the command line does so for each tensor, which takes longer.
    """
    calls = gradients.Calls(case.reference)
    try:
        grads = gradients.gradients_of(case, calls)
        inputs = gradients.inputs_of(case.params, case.state)
        by_hand, numeric, error = along_a_direction(case, inputs, grads)
    except Exception as raised:  # of shapes that a change makes
        return f"WRONG: {type(raised).__name__}: {raised}"
    both = f"{by_hand:+.6f} by hand, {numeric:+.6f} by finite differences"
    if error <= gradients.TOLERANCE:
        return f"All {len(inputs)} gradients are right. Along a random direction: {both}."
    live.alive()
    names = " or ".join(gradients.guilty(case, calls))
    return f"WRONG: along a random direction the gradient is {both}. Look at {names}."


def along_a_direction(
    case: gradients.Case, inputs: dict, grads: dict
) -> tuple[float, float, float]:
    """(the derivative by hand, by differences, their relative error) of all inputs together."""
    rng = np.random.default_rng(0)
    directions = {name: rng.standard_normal(array.shape) for name, array in inputs.items()}
    by_hand = np.array(sum((grads[name] * directions[name]).sum() for name in inputs))
    with gradients.holding_what_is_stopped(case) as objective:

        def objective_along(given: dict) -> float:
            return objective({n: inputs[n] + given["far"] * directions[n] for n in inputs})

        return gradients.compared(objective_along, {"far": 0.0}, "far", by_hand, np.ones(()))


def outcome(paper: str, function: str) -> tuple[dict, list]:
    """({name: array} of a rollout, {variable: array} of each of the function's calls in it)."""
    case = gradients.read_case(paper, gradients.case_names(paper)[0])
    given = (case.reference, case.params, case.config, case.segments, case.state)
    with np.errstate(all="ignore"):
        rows, _, _ = rollout_forward(*given)
        recorder = Recorder(case.reference)
        recorder.codes = {name: code for name, code in recorder.codes.items() if name == function}
        recorder.record("", case.segments, gradients.gradients_of, case)
    calls = []
    for call in recorder.calls:
        held = {}
        for place, number in zip(recorder.functions[function].places, call.held, strict=True):
            value = recorder.values.shown[number] if number >= 0 else None
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                held[".".join(place.path)] = value
        calls.append(held)
    return rows, calls
