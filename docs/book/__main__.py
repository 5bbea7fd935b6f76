"""The open book: python -m docs.book --out FOLDER writes chapters beside their code and the values of a real run.

record.py runs a reference and keeps what its variables held, replay.py does so for memory replay, text.py makes HTML of the
chapters, and page.html is a page without its data. Pages load nothing from elsewhere. Needs `pip install -e '.[docs]'`.
"""

import argparse
import base64
import html
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from docs.book.record import Function, Recorder
from docs.book.replay import replay_data
from docs.book.text import chapter_html, code_html
from reference.gradients import (
    Case,
    case_names,
    default_case,
    gradients_of,
    holding_what_is_stopped,
    inputs_of,
    read_case,
)

HERE = Path(__file__).parent
METHODS = ("compressive", "block_recurrent", "memformer", "pretrained_recurrence", "memorizing")
VIEW = (
    HERE.parents[1] / "accelerated" / "evaluation" / "view.html"
)  # its colours and its helper `make` are ours too
LETTERS = {
    "segment": "N",
    "width": "D",
    "heads": "H",
    "head_width": "E",
    "feed_forward": "F",
    "vocabulary": "V",
    "layers": "L",
}
LETTERS |= {"window": "W", "memory": "M", "compressed_memory": "C", "compression_rate": "c"}
LETTERS |= dict.fromkeys(("states", "slots", "vectors"), "S")
SHAPE = re.compile(
    r"((?:\w+(?:, | and ))*\w+)[^()\n]{0,12}? ?\(([A-Z1][\w*+/ ]*(?:, [\w*+/ ]+)+)\)"
)  # q and k (B, N, D)
BINDING = re.compile(
    r"^ *([\w, ]+?) \+?= .*#.*?\(([^()]+)\)", re.M
)  # q = x @ w  # what it is (B, N, D)


def pages() -> dict[Path, str]:
    """{page of docs/: page of the book}."""
    docs = HERE.parent
    found = {docs / f"{name}.md": f"{name}.html" for name in ("index", *METHODS)} | {
        HERE / "replay.md": "replay.html"
    }
    return found | {
        path: f"decisions_{path.stem}.html" for path in sorted((docs / "decisions").glob("*.md"))
    }


def fits(extent: str, size: int, sizes: dict[str, int]) -> bool:
    """Whether an extent such as C + M, HE or N/c can be `size`; a letter without a size of its own can be any."""
    extent = re.sub(r"(?<=\w)(?=[A-Za-z])", "*", extent.strip())  # HE is H*E
    letters = set(re.findall(r"[A-Za-z]", extent))
    return not letters <= sizes.keys() or eval(extent, {"__builtins__": {}}, sizes) == size


def letters_of(
    name: str, shape: tuple, documented: list[tuple[str, str]], sizes: dict[str, int]
) -> list[str] | None:
    """The letters of an array, by what comments and docstrings say of a variable of that name; None if they say nothing."""
    for names, letters in documented:
        extents, known = letters.split(", "), re.findall(r"\w+", names)
        same = len(extents) == len(shape) and (name in known or name.removeprefix("d") in known)
        if same and all(
            fits(extent, size, sizes) for extent, size in zip(extents, shape, strict=True)
        ):
            return extents
    return None


def glossary_of(docstring: str) -> dict[str, str]:
    """{code symbol: meaning} of a reference's glossary."""
    rows = re.findall(r"^    (\S.*?) {2,}(\S.*?)(?: {2,}.*)?$", docstring, re.M)
    return {
        name.removeprefix("state."): meaning
        for names, meaning in rows
        for name in names.split(", ")
    }


def whole_rollouts(case: Case) -> Iterator[tuple]:
    """Functions that the case does not call, and most of which read whole documents: (function, *arguments)."""
    reference, params, config, segments = case.reference, case.params, case.config, case.segments
    yield reference.init_params, config, np.random.default_rng(0)
    if hasattr(reference, "memory_replay"):
        yield reference.memory_replay, params, config, segments, case.state
        yield reference.through_time, params, config, segments, case.state
    elif hasattr(reference, "windows_of"):
        document = np.concatenate([segment.tokens for segment in segments], axis=1)
        windows = reference.windows_of(config, document)
        yield reference.loss_and_gradients, params, config, windows
        yield reference.checkpointed, params, config, windows
        yield reference.greedy_continuation, params, config, document, 2
    else:
        yield (
            reference.loss_and_gradients,
            params,
            config,
            [(segment.tokens, segment.targets) for segment in segments],
        )


def recorded(method: str, name: str, case: Case) -> Recorder:
    """The calls of a case, with finite differences, and of functions that it does not call in other runs and cases."""
    recorder, inputs = Recorder(case.reference), inputs_of(case.params, case.state)
    recorder.record(f"case {name}", case.segments, gradients_of, case)
    with holding_what_is_stopped(case) as objective:
        objective(inputs)
        recorder.add_differences(lambda: objective(inputs))
    for function, *arguments in whole_rollouts(case):
        recorder.record("a run of its own", case.segments, function, *arguments)
    for other in case_names(method):
        its = read_case(method, other)
        recorder.record(f"case {other}", its.segments, gradients_of, its)
    return recorder


def function_data(function: Function, recorder: Recorder, sizes: dict[str, int]) -> dict:
    """A function as the page wants it: its code, and each place's path and letters, which its forward function may say."""
    forward = recorder.functions.get(re.sub("backward$", "forward", function.name), function)
    held = [call.held for call in recorder.calls if call.function == function.name]
    sources, places, shown = f"{function.source}\n{forward.source}", [], recorder.values.shown
    documented = SHAPE.findall(sources) + BINDING.findall(sources)
    for number, place in enumerate(function.places):
        values = (shown[numbers[number]] for numbers in held if numbers[number] >= 0)
        shape = next((value.shape for value in values if isinstance(value, np.ndarray)), ())
        places.append([".".join(place.path), letters_of(place.path[-1], shape, documented, sizes)])
    code = code_html(function.source, recorder.functions, function.first, function.places)
    return {"line": function.first, "code": code, "places": places}


def method_data(method: str) -> dict:
    """All that a method's page shows beside its text."""
    name = default_case(method)
    case = read_case(method, name)
    recorder = recorded(method, name, case)
    sizes = {
        letter: getattr(case.config, field)
        for field, letter in LETTERS.items()
        if hasattr(case.config, field)
    }
    sizes["B"] = len(case.segments[0].tokens)
    shown, paths = (
        recorder.values.shown,
        [place.path for place in recorder.functions["forward"].places],
    )
    before, returned = (
        paths.index(("state",)),
        paths.index(("return",)),
    )  # (logits, next state, cache)
    held = [call.held for call in recorder.calls if call.function == "forward"]
    return {
        "kind": "method",
        "name": method,
        "starts": [segment.starts.tolist() for segment in case.segments],
        "states": [[numbers[before], shown[numbers[returned]]["parts"]["1"]] for numbers in held],
        "functions": {
            name: function_data(function, recorder, sizes)
            for name, function in recorder.functions.items()
        },
        "calls": recorder.calls,
        "glossary": glossary_of(case.reference.__doc__),
        "values": shown,
    }


def encoded(value: object) -> dict:
    """What JSON has no form for: an array, whose numbers are float32 in base64, and a call."""
    if not isinstance(value, np.ndarray):
        return vars(value)
    with np.errstate(over="ignore"):  # the lowest float64 becomes -inf
        numbers = value.astype(np.float32)
    return {
        "shape": value.shape,
        "kind": value.dtype.kind,
        "data": base64.b64encode(numbers.tobytes()).decode(),
    }


def write_page(out: Path, path: Path) -> int:
    """Write a page of the book and return its size in bytes. In its JSON no < stands, so that no text can end the script."""
    name = pages()[path]
    method = name.removesuffix(".html")
    data = (
        method_data(method)
        if method in METHODS
        else replay_data()
        if method == "replay"
        else {"kind": "text"}
    )
    text = chapter_html(path, pages(), data.get("functions", {}))
    links = {"index.html": "Start"} | {
        f"{m}.html": m.replace("_", " ") for m in (*METHODS, "replay")
    }
    here = ' aria-current="page"'
    menu = " ".join(
        f'<a href="{to}"{here if to == name else ""}>{of}</a>' for to, of in links.items()
    )
    script = json.dumps(data, separators=(",", ":"), default=encoded).replace("<", "\\u003c")
    title = html.escape(path.read_text().partition("\n")[0].removeprefix("# "))
    light, dark = re.findall(r":root \{(.*?)\}", VIEW.read_text(), re.S)
    make = re.search(r"^function make\(.*?^\}", VIEW.read_text(), re.M | re.S)[0]
    parts = {
        "TITLE": title,
        "LIGHT": light,
        "DARK": dark,
        "MENU": menu,
        "TEXT": text,
        "DATA": script,
        "MAKE": make,
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], (HERE / "page.html").read_text())
    return (out / name).write_bytes(page.encode())


def build(out: Path) -> dict[str, int]:
    """Write all pages, in two processes; returns {page: bytes}."""
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2) as workers:
        sizes = {page: workers.submit(write_page, out, path) for path, page in pages().items()}
        return {page: size.result() for page, size in sizes.items()}


def main(argv: list[str] | None = None) -> int:
    """Build the book; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m docs.book", description="Write the book, a folder of pages for a browser."
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder; index.html is its first page"
    )
    out = parser.parse_args(argv).out
    if out.exists() and not out.is_dir():
        print(f"--out {out} is a file; give a folder", file=sys.stderr)
        return 2
    for page, size in sorted(build(out).items()):
        print(f"{size / 1e6:6.2f} MB  {out / page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
