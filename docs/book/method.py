"""What a chapter's page shows beside its text: its reference's code, and a real run of it.

docs/book/site.py uses it; record.py runs the reference.
"""

import re
from collections.abc import Iterator

import numpy as np

from docs.book.record import Recorder
from docs.book.text import code_html
from reference.check import load
from reference.gradients import Case, case_names, function_of, gradients_of, path_of, read_case

MANY = 12  # values inside a layer


def glossary_of(docstring: str) -> dict[str, str]:
    """{code symbol: meaning} of a reference's glossary."""
    rows = re.findall(r"^    (\S.*?) {2,}(\S.*?)(?: {2,}.*)?$", docstring, re.M)
    glossary = {}
    for names, meaning in rows:
        for name in names.split(", "):
            glossary[name.removeprefix("state.")] = meaning
    return glossary


def whole_rollouts(case: Case) -> Iterator[tuple]:
    """Functions that read a whole document, which the case does not call.

    Each is (function, *arguments).
    """
    reference = case.reference
    given = (case.params, case.config)
    if hasattr(reference, "memory_replay"):
        pairs = [(segment.tokens, segment.targets) for segment in case.segments]
        yield reference.memory_replay, *given, pairs, case.state
        yield function_of(reference, "through_time"), *given, pairs, case.state
    elif hasattr(reference, "windows_of"):
        document = np.concatenate([segment.tokens for segment in case.segments], axis=1)
        windows = reference.windows_of(case.config, document)
        yield reference.loss_and_gradients, *given, windows


def default_case(paper: str) -> str:
    """The first case whose file has what most lines of a layer hold, or else the first."""
    names = case_names(paper)
    for name in names:
        rows, _ = load(path_of(paper, name))
        if sum("inner/" in row for row in rows) > MANY:
            return name
    return names[0]


def recorded(method: str, name: str, case: Case) -> Recorder:
    """The calls of a case; of functions that it does not call, those in other runs and cases."""
    recorder = Recorder(case.reference)
    recorder.record(f"case {name}", case.segments, gradients_of, case)
    for function, *arguments in whole_rollouts(case):
        recorder.record("a run of its own", case.segments, function, *arguments)
    for other in case_names(method):
        its = read_case(method, other)
        recorder.record(f"case {other}", its.segments, gradients_of, its)
    return recorder


def states_of(recorder: Recorder) -> list[list[int]]:
    """The numbers of [state, next state] of each call of forward.

    It returns (logits, next state, cache).
    """
    shown = recorder.values.shown
    paths = [place.path for place in recorder.functions["forward"].places]
    state = paths.index(("state",))
    returned = paths.index(("return",))
    states = []
    for call in recorder.calls:
        if call.function == "forward":
            next_state = shown[call.held[returned]]["parts"]["1"]
            states.append([call.held[state], next_state])
    return states


def method_data(method: str) -> dict:
    """All that a method's page shows beside its text."""
    name = default_case(method)
    case = read_case(method, name)
    recorder = recorded(method, name, case)
    addresses = {name: f"#{name}" for name in recorder.functions}
    functions = {}
    for function in recorder.functions.values():
        functions[function.name] = {
            "file": function.file,
            "line": function.first,
            "code": code_html(function.source, addresses, function.first, function.places),
            "places": [".".join(place.path) for place in function.places],
        }
    return {
        "kind": "method",
        "name": method,
        "starts": [segment.starts.tolist() for segment in case.segments],
        "states": states_of(recorder),
        "functions": functions,
        "calls": recorder.calls,
        "glossary": glossary_of(case.reference.__doc__),
        "values": recorder.values.shown,
    }
