"""The open book: python -m docs.book --out FOLDER writes chapters beside their code and a real run.

record.py runs a reference and keeps what its variables held, replay.py does so for memory replay,
text.py makes HTML of the chapters, and page.html is a page without its data. Pages load nothing
from elsewhere. Needs `pip install -e '.[docs]'`.
"""

import argparse
import base64
import html
import json
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from accelerated.models import NAMES
from docs.book.record import Function, Recorder
from docs.book.replay import replay_data
from docs.book.text import chapter_html, code_html
from reference.check import load
from reference.gradients import (
    Case,
    case_names,
    gradients_of,
    holding_what_is_stopped,
    inputs_of,
    path_of,
    read_case,
)

HERE = Path(__file__).parent
METHODS = [name for name in NAMES if (HERE.parent / f"{name}.md").exists()]
# its colours and its helper `make` are ours too
VIEW = HERE.parents[1] / "accelerated" / "evaluation" / "view.html"
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


def pages() -> dict[Path, str]:
    """{page of docs/: page of the book}."""
    docs = HERE.parent
    found = {docs / f"{name}.md": f"{name}.html" for name in ("index", *METHODS)}
    found[HERE / "replay.md"] = "replay.html"
    for path in sorted((docs / "decisions").glob("*.md")):
        found[path] = f"decisions_{path.stem}.html"
    return found


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
    if hasattr(reference, "memory_replay"):
        yield reference.memory_replay, *given, segments, case.state
        yield reference.through_time, *given, segments, case.state
    elif hasattr(reference, "windows_of"):
        document = np.concatenate([segment.tokens for segment in segments], axis=1)
        windows = reference.windows_of(case.config, document)
        yield reference.loss_and_gradients, *given, windows
        yield reference.checkpointed, *given, windows
        yield reference.greedy_continuation, *given, document, 2
    else:
        pairs = [(segment.tokens, segment.targets) for segment in segments]
        yield reference.loss_and_gradients, *given, pairs


def default_case(paper: str) -> str:
    """The first case whose file has what a layer puts out, or else the first."""
    names = case_names(paper)
    for name in names:
        rows, _ = load(path_of(paper, name))
        if any(row.endswith("layer_output") for row in rows):
            return name
    return names[0] if names else ""


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
    code = code_html(function.source, recorder.functions, function.first, function.places)
    return {"line": function.first, "code": code, "places": places}


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


def data_of(page: str) -> dict:
    """All that a page of the book shows beside its text."""
    name = page.removesuffix(".html")
    if name in METHODS:
        return method_data(name)
    return replay_data() if name == "replay" else {"kind": "text"}


def encoded(value: object) -> dict:
    """What JSON has no form for: an array, whose numbers are float32 in base64, and a call."""
    if not isinstance(value, np.ndarray):
        return vars(value)
    with np.errstate(over="ignore"):  # the lowest float64 becomes -inf
        numbers = value.astype(np.float32)
    data = base64.b64encode(numbers.tobytes()).decode()
    return {"shape": value.shape, "kind": value.dtype.kind, "data": data}


def menu_of(page: str) -> str:
    """The links to the other pages, in HTML."""
    names = {"index.html": "Start"}
    for method in (*METHODS, "replay"):
        names[f"{method}.html"] = method.replace("_", " ")
    links = []
    for address, name in names.items():
        here = ' aria-current="page"' if address == page else ""
        links.append(f'<a href="{address}"{here}>{name}</a>')
    return " ".join(links)


def write_page(out: Path, path: Path) -> int:
    """Write a page of the book and return its size in bytes.

    In its JSON no < stands, so that no text can end the script.
    """
    name = pages()[path]
    data = data_of(name)
    view = VIEW.read_text()
    light, dark = re.findall(r":root \{(.*?)\}", view, re.S)
    script = json.dumps(data, separators=(",", ":"), default=encoded)
    title = path.read_text().partition("\n")[0].removeprefix("# ")
    parts = {
        "TITLE": html.escape(title),
        "LIGHT": light,
        "DARK": dark,
        "MENU": menu_of(name),
        "TEXT": chapter_html(path, pages(), data.get("functions", {})),
        "DATA": script.replace("<", "\\u003c"),
        "MAKE": re.search(r"^function make\(.*?^\}", view, re.M | re.S)[0],
    }
    blank = (HERE / "page.html").read_text()
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], blank)
    return (out / name).write_bytes(page.encode())


def end_with_parent() -> None:
    """In a worker: end as soon as the process that started it does, even if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def build(out: Path) -> dict[str, int]:
    """Write all pages, in two processes; returns {page: bytes}."""
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, initializer=end_with_parent) as workers:
        sizes = {page: workers.submit(write_page, out, path) for path, page in pages().items()}
        return {page: size.result() for page, size in sizes.items()}


def main(argv: list[str] | None = None) -> int:
    """Build the book; returns the exit code."""
    about = "Write the book, a folder of pages for a browser."
    parser = argparse.ArgumentParser("python -m docs.book", description=about)
    a_folder = "the folder; index.html is its first page"
    parser.add_argument("--out", type=Path, required=True, help=a_folder)
    out = parser.parse_args(argv).out
    try:
        sizes = build(out)
    except OSError as error:
        print(f"cannot write --out {out}: {error.strerror}; give another folder", file=sys.stderr)
        return 2
    for page, size in sorted(sizes.items()):
        print(f"{size / 1e6:6.2f} MB  {out / page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
