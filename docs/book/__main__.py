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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from docs.book import replay
from docs.book.record import Call, Function, Recorder, Values, differences_of, functions_of
from docs.book.text import DOCS, Chapter, code_html
from reference.gradients import Case, case_names, default_case, holding_what_is_stopped, inputs_of, read_case
from reference.rollout import rollout_backward, rollout_forward

METHODS = ("compressive", "block_recurrent", "memformer", "pretrained_recurrence", "memorizing")
VIEW = DOCS.parent / "accelerated" / "evaluation" / "view.html"  # its colours and its helper `make` are ours too
SHAPE = re.compile(r"((?:\w+(?:, | and ))*\w+)[^()\n]{0,12}? ?\(([A-Z1][\w*+/ ]*(?:, [\w*+/ ]+)+)\)")
FIELDS = {"N": "segment", "D": "width", "H": "heads", "E": "head_width", "F": "feed_forward", "V": "vocabulary", "L": "layers"}
FIELDS |= {"W": "window", "S": "states slots vectors", "M": "memory", "C": "compressed_memory", "c": "compression_rate"}


def pages() -> dict[Path, str]:
    """{page of docs/: page of the book}."""
    found = {DOCS / "index.md": "index.html"} | {DOCS / f"{method}.md": f"{method}.html" for method in METHODS}
    return found | {path: f"decisions_{path.stem}.html" for path in sorted((DOCS / "decisions").glob("*.md"))}


def sizes_of(case: Case) -> dict[str, int]:
    """{dimension letter: its size} of a case."""
    named = {
        letter: next((getattr(case.config, f) for f in of.split() if hasattr(case.config, f)), None)
        for letter, of in FIELDS.items()
    }
    return {"B": len(case.segments[0].tokens)} | {letter: size for letter, size in named.items() if size is not None}


def fits(extent: str, size: int, sizes: dict[str, int]) -> bool:
    """Whether an extent such as C + M, HE or N/c can be `size`; a letter without a size of its own can be any."""
    extent = re.sub(r"(?<=\w)(?=[A-Za-z])", "*", extent.strip())  # HE is H*E
    letters = set(re.findall(r"[A-Za-z]", extent))
    return not letters <= sizes.keys() or eval(extent, {"__builtins__": {}}, sizes) == size


def letters_of(name: str, shape: tuple, documented: list[tuple[str, list[str]]], sizes: dict[str, int]) -> list[str] | None:
    """The letters of an array, by what comments and docstrings say of a variable of that name; None if they say nothing."""
    for of, extents in documented:
        of_name = of in (name, name.removeprefix("d")) and len(extents) == len(shape)
        if of_name and all(fits(extent, size, sizes) for extent, size in zip(extents, shape, strict=True)):
            return extents
    return None


def documented_shapes(source: str) -> list[tuple[str, list[str]]]:
    """(variable, its extents) as the docstring and the comments of a function say; a line's comment is of what it binds."""
    found = []
    for names, shape in SHAPE.findall(source):
        found += [(name, shape.split(", ")) for name in re.findall(r"\w+", names)]
    for bound, shape in re.findall(r"^ *([\w, ]+?) \+?= .*#.*?\(([^()]+)\)", source, re.M):
        found += [(name, shape.split(", ")) for name in re.findall(r"\w+", bound)]
    return found


def glossary_of(docstring: str) -> dict[str, str]:
    """{code symbol: meaning} of a reference's glossary."""
    rows = re.findall(r"^    (\S.*?) {2,}(\S.*?)(?: {2,}.*)?$", docstring, re.M)
    return {name.removeprefix("state."): meaning for names, meaning in rows for name in names.split(", ")}


def encoded(value: tuple) -> object:
    """A value of Values for the page: an array is its shape, kind and float32 in base64."""
    if value[0] == "array":
        with np.errstate(over="ignore"):  # the lowest float64 becomes -inf
            numbers = np.ascontiguousarray(value[1], np.float32)
        return [list(value[1].shape), value[1].dtype.kind, base64.b64encode(numbers.tobytes()).decode()]
    return {"text": value[1]} if value[0] == "text" else {"kind": value[1], "parts": value[2]}


def objective_of(case: Case) -> dict:
    """All gradients of a case, by its reference."""
    _, caches, _ = rollout_forward(case.reference, case.params, case.config, case.segments, case.state)
    return rollout_backward(case.reference, case.params, case.config, caches)


def whole_rollouts(case: Case) -> list:
    """Runs of the functions that read whole documents, which the case does not call."""
    reference, config, segments = case.reference, case.config, case.segments
    runs = [lambda: reference.init_params(config, np.random.default_rng(0))]
    if hasattr(reference, "memory_replay"):
        runs += [
            lambda f=f: f(case.params, config, segments, case.state) for f in (reference.memory_replay, reference.through_time)
        ]
    elif hasattr(reference, "windows_of"):
        document = np.concatenate([segment.tokens for segment in segments], axis=1)
        windows = reference.windows_of(config, document)
        runs += [lambda f=f: f(case.params, config, windows) for f in (reference.loss_and_gradients, reference.checkpointed)]
        runs += [lambda: reference.greedy_continuation(case.params, config, document, 2)]
    else:
        runs += [lambda: reference.loss_and_gradients(case.params, config, [(s.tokens, s.targets) for s in segments])]
    return runs


def recorded(case: Case, name: str, functions: dict[str, Function], values: Values) -> list[tuple[str, Call]]:
    """(where the numbers are from, call): of the case, and of functions that it does not call in other runs and cases."""
    recorder = Recorder(case.reference, functions, values, case.segments)
    recorder.record(lambda: objective_of(case))
    found = [(f"case {name}", call) for call in recorder.calls]
    others = [("a run of its own", case.segments, run) for run in whole_rollouts(case)]
    for other in case_names(name_of(case)):
        its = read_case(name_of(case), other)
        others.append((f"case {other}", its.segments, lambda its=its: objective_of(its)))
    for source, segments, run in others:
        rest = {f: function for f, function in functions.items() if f not in {call.function for _, call in found}}
        recorder = Recorder(case.reference, rest, values, segments)
        recorder.record(run)
        found += [(source, call) for call in recorder.calls]
    return found


def name_of(case: Case) -> str:
    """The method of a case."""
    return case.reference.__name__.rpartition(".")[2]


def differences(case: Case, functions: dict[str, Function], calls: list[Call], values: Values) -> dict[int, dict]:
    """{id of a call: {place's path and value: [value beside the gradient, entries by differences]}}."""
    codes = {name: getattr(case.reference, name).__code__ for name, function in functions.items() if function.places}
    inputs, found = inputs_of(case.params, case.state), {}
    with holding_what_is_stopped(case) as objective:
        objective(inputs)
        for call, path, difference in differences_of(lambda: objective(inputs), codes, functions, calls, values):
            found.setdefault(id(call), {})[path] = difference
    return found


def function_data(function: Function, functions: dict, calls: list[Call], values: Values, sizes: dict) -> dict:
    """A function as the page wants it: its code, and each place's path and letters, which its forward function may say."""
    forward = functions.get(re.sub("backward$", "forward", function.name), function)
    documented, places = documented_shapes(function.source) + documented_shapes(forward.source), []
    for number, place in enumerate(function.places):
        arrays = (values.values[call.held[number]] for call in calls if call.held[number] >= 0)
        shape = next((value[1].shape for value in arrays if value[0] == "array"), None)
        places.append([".".join(place.path), shape and letters_of(place.path[-1], shape, documented, sizes)])
    code = code_html(function.source, function, tuple(functions))
    return {"name": function.name, "line": function.first, "code": code, "places": places}


def method_data(method: str) -> dict:
    """All that a method's page shows beside its text."""
    name = default_case(method)
    case, values = read_case(method, name), Values()
    functions = functions_of(Path(case.reference.__file__))
    sizes = sizes_of(case)
    found = recorded(case, name, functions, values)
    calls = [call for _, call in found]
    beside = differences(case, functions, [call for source, call in found if source == f"case {name}"], values)
    number = {id(call): at for at, call in enumerate(calls)}
    rows = []
    for source, call in found:
        up, forward = (number.get(id(other), -1) for other in (call.parent, call.forward))
        rows.append([call.function, call.segment, call.layer, up, forward, call.held, beside.get(id(call), {}), source])
    listed = [
        function_data(function, functions, [call for call in calls if call.function == function.name], values, sizes)
        for function in functions.values()
    ]
    paths = [place.path for place in functions["forward"].places]
    before, returned = paths.index(("state",)), paths.index(("return",))  # (logits, next state, cache)
    of_forward = [call.held for call in calls if call.function == "forward"]
    states = [[held[before], dict(values.values[held[returned]][2])["1"]] for held in of_forward]
    about = {"kind": "method", "name": method, "case": name, "sizes": sizes, "states": states, "functions": listed, "calls": rows}
    about["starts"] = [segment.starts.tolist() for segment in case.segments]
    return about | {"glossary": glossary_of(case.reference.__doc__), "values": [encoded(value) for value in values.values]}


def replay_data() -> dict:
    """All that the page on replay shows beside its text."""
    steps, apart = replay.both()
    functions = functions_of(Path(replay.reference.__file__))
    shown, values = [], Values()
    for title, name in replay.METHODS.items():
        function = functions[name]
        code = code_html(function.source, function._replace(places=[]))
        rows = [[*step[:5], -1 if step.gradient is None else values.keep(step.gradient)] for step in steps[title]]
        shown.append({"title": title, "name": name, "line": function.first, "code": code, "steps": rows})
    about = {"kind": "replay", "segments": replay.SEGMENTS, "methods": shown, "apart": apart}
    return about | {"values": [encoded(value) for value in values.values]}


def palette() -> str:
    """The colours of view.html, light and dark, by the reader's system and by the page's switch."""
    light, dark = (block.strip() for block in re.findall(r":root \{(.*?)\}", VIEW.read_text(), re.S))
    rules = [f":root {{ {light} color-scheme: light }}"]
    rules.append(f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} color-scheme: dark }} }}")
    return "\n".join([*rules, f":root.light {{ {light} color-scheme: light }}", f":root.dark {{ {dark} color-scheme: dark }}"])


def write_page(out: Path, name: str, title: str, text: str, data: dict) -> int:
    """Write a page of the book and return its size in bytes. In its JSON no < stands, so that no text can end the script."""
    make = re.search(r"^function make\(.*?^\}", VIEW.read_text(), re.M | re.S)[0]
    links = {"index.html": "Start"} | {f"{m}.html": m.replace("_", " ") for m in METHODS} | {"replay.html": "replay"}
    here = ' aria-current="page"'
    menu = " ".join(f'<a href="{to}"{here if to == name else ""}>{html.escape(of)}</a>' for to, of in links.items())
    script = json.dumps(data, separators=(",", ":"), default=list).replace("<", "\\u003c")
    parts = {"TITLE": html.escape(title), "PALETTE": palette(), "MENU": menu, "TEXT": text, "DATA": script, "MAKE": make}
    page = Path(__file__).with_name("page.html").read_text()
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)
    return (out / name).write_bytes(page.encode())


def write_text_page(out: Path, path: Path) -> int:
    """Write a page that is text alone."""
    title = path.read_text().partition("\n")[0].removeprefix("# ")
    return write_page(out, pages()[path], title, Chapter(path, pages()).html(), {"kind": "text"})


def write_method(out: Path, method: str) -> int:
    """Write a method's page."""
    data, path = method_data(method), DOCS / f"{method}.md"
    title = path.read_text().partition("\n")[0].removeprefix("# ")
    names = tuple(function["name"] for function in data["functions"])
    return write_page(out, f"{method}.html", title, Chapter(path, pages(), names).html(), data)


def build(out: Path) -> dict[str, int]:
    """Write all pages, in two processes; returns {page: bytes}."""
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2) as workers:
        sizes = {f"{method}.html": workers.submit(write_method, out, method) for method in METHODS}
        for path, page in pages().items():
            if page not in sizes:
                sizes[page] = workers.submit(write_text_page, out, path)
        text = Chapter(Path(__file__).with_name("replay.md"), pages()).html()
        written = write_page(out, "replay.html", "Memory replay, step by step", text, replay_data())
        return {page: size.result() for page, size in sizes.items()} | {"replay.html": written}


def main(argv: list[str] | None = None) -> int:
    """Build the book; returns the exit code."""
    parser = argparse.ArgumentParser("python -m docs.book", description="Write the book, a folder of pages for a browser.")
    parser.add_argument("--out", type=Path, required=True, help="the folder; index.html is its first page")
    out = parser.parse_args(argv).out
    if out.exists() and not out.is_dir():
        print(f"--out {out} is a file; give a folder", file=sys.stderr)
        return 2
    for page, size in sorted(build(out).items()):
        print(f"{size / 1e6:6.2f} MB  {out / page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
