"""What a chapter's page shows beside its text: its reference's code, and a real run of it.

docs/book/site.py uses it; record.py runs the reference.
"""

import re
from collections.abc import Iterator

import numpy as np

from docs.book.record import Function, Recorder
from docs.book.text import code_html
from reference.check import load
from reference.gradients import (
    Case,
    case_names,
    function_of,
    gradients_of,
    holding_what_is_stopped,
    inputs_of,
    path_of,
    read_case,
)

MANY = 12  # values inside a layer
LETTERS = {  # {field of a Config: letter}
    "segment": "N",
    "width": "D",
    "heads": "H",
    "head_width": "E",
    "feed_forward": "F",
    "vocabulary": "V",
    "layers": "L",
    "window": "W",
    "memory": "M",
    "compressed_memory": "C",
    "compression_rate": "c",
    "states": "S",
    "slots": "S",
    "vectors": "S",
}
# q and k (B, N, D)
SHAPE = re.compile(
    r"((?:\w+(?:, | and ))*\w+)[^()\n]{0,12}? ?\(([A-Z1][\w*+/ ]*(?:, [\w*+/ ]+)+)\)"
)
# q = x @ w  # what it is (B, N, D)
BINDING = re.compile(r"^ *([\w, ]+?) \+?= .*#.*?\(([^()]+)\)", re.M)


def fits(extent: str, size: int, sizes: dict[str, int]) -> bool:
    """Whether an extent such as C + M, HE or N/c can be `size`.

    A letter without a size of its own can be any.
    """
    extent = re.sub(r"(?<=\w)(?=[A-Za-z])", "*", extent.strip())  # HE is H*E
    letters = set(re.findall(r"[A-Za-z]", extent))
    if not letters <= sizes.keys():
        return True
    return eval(extent, {"__builtins__": {}}, sizes) == size


def letters_of(
    name: str, shape: tuple, documented: list[tuple[str, str]], sizes: dict[str, int]
) -> list[str] | None:
    """The letters of an array, by what comments and docstrings say of a variable of that name.

    None if they say nothing.
    """
    for names, letters in documented:
        known = re.findall(r"\w+", names)
        extents = letters.split(", ")
        is_named = name in known or name.removeprefix("d") in known
        if not is_named or len(extents) != len(shape):
            continue
        pairs = zip(extents, shape, strict=True)
        if all(fits(extent, size, sizes) for extent, size in pairs):
            return extents
    return None


def glossary_of(docstring: str) -> dict[str, str]:
    """{code symbol: meaning} of a reference's glossary."""
    rows = re.findall(r"^    (\S.*?) {2,}(\S.*?)(?: {2,}.*)?$", docstring, re.M)
    glossary = {}
    for names, meaning in rows:
        for name in names.split(", "):
            glossary[name.removeprefix("state.")] = meaning
    return glossary


def whole_rollouts(case: Case) -> Iterator[tuple]:
    """Functions that the case does not call, most of which read whole documents.

    Each is (function, *arguments).
    """
    reference = case.reference
    given = (case.params, case.config)
    segments = case.segments
    yield reference.init_params, case.config, np.random.default_rng(0)
    pairs = [(segment.tokens, segment.targets) for segment in segments]
    if hasattr(reference, "memory_replay"):
        yield reference.memory_replay, *given, pairs, case.state
        yield reference.through_time, *given, pairs, case.state
    elif hasattr(reference, "windows_of"):
        document = np.concatenate([segment.tokens for segment in segments], axis=1)
        windows = reference.windows_of(case.config, document)
        yield reference.loss_and_gradients, *given, windows
        yield function_of(reference, "checkpointed"), *given, windows
        yield function_of(reference, "greedy_continuation"), *given, document, 2


def default_case(paper: str) -> str:
    """The first case whose file has what most lines of a layer hold, or else the first."""
    names = case_names(paper)
    for name in names:
        rows, _ = load(path_of(paper, name))
        if sum("inner/" in row for row in rows) > MANY:
            return name
    return names[0]


def recorded(method: str, name: str, case: Case) -> Recorder:
    """The calls of a case, with finite differences.

    And of functions that it does not call, in other runs and cases.
    """
    recorder = Recorder(case.reference)
    recorder.record(f"case {name}", case.segments, gradients_of, case)
    inputs = inputs_of(case.params, case.state)
    with holding_what_is_stopped(case) as objective:
        objective(inputs)
        recorder.add_differences(lambda: objective(inputs))
    for function, *arguments in whole_rollouts(case):
        recorder.record("a run of its own", case.segments, function, *arguments)
    for other in case_names(method):
        its = read_case(method, other)
        recorder.record(f"case {other}", its.segments, gradients_of, its)
    return recorder


def shape_held(recorder: Recorder, function: Function, number: int) -> tuple:
    """The shape of the first array that a place of a function held; () if it held none."""
    shown = recorder.values.shown
    for call in recorder.calls:
        if call.function == function.name and call.held[number] >= 0:
            value = shown[call.held[number]]
            if isinstance(value, np.ndarray):
                return value.shape
    return ()


def function_data(function: Function, recorder: Recorder, sizes: dict[str, int]) -> dict:
    """A function as the page wants it: its code, and each place's path and letters.

    Its forward function may say these.
    """
    forward = recorder.functions.get(re.sub("backward$", "forward", function.name), function)
    sources = f"{function.source}\n{forward.source}"
    documented = SHAPE.findall(sources) + BINDING.findall(sources)
    places = []
    for number, place in enumerate(function.places):
        shape = shape_held(recorder, function, number)
        letters = letters_of(place.path[-1], shape, documented, sizes)
        places.append([".".join(place.path), letters])
    addresses = {name: f"#{name}" for name in recorder.functions}
    code = code_html(function.source, addresses, function.first, function.places)
    return {"file": function.file, "line": function.first, "code": code, "places": places}


def sizes_of(case: Case) -> dict[str, int]:
    """{letter: size} of a case."""
    sizes = {"B": len(case.segments[0].tokens)}
    for field, letter in LETTERS.items():
        if hasattr(case.config, field):
            sizes[letter] = getattr(case.config, field)
    return sizes


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
    sizes = sizes_of(case)
    functions = {}
    for function in recorder.functions.values():
        functions[function.name] = function_data(function, recorder, sizes)
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
