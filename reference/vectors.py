"""python -m reference.vectors --model NAME --config JSON --seed N --out FILE: vectors of any sizes.

A file has what a port is given and what it has to compute, in the order of computation: values
inside the first layer of segment 0, results by segment, then gradients from the last segment to the
first. FILE.json has the config. docs/porting.md names the tensors. It needs NumPy alone.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from reference.check import GIVEN, INNER, CheckError, exit_code
from reference.gradients import Case, fields_of, module_of, modules_of
from reference.rollout import Segment, named, rollout_forward, segments_backward

LANES = 3
SEGMENTS = 3
STARTS = (2, 1, -1)  # the lane that starts a document, by segment
BITS = 2**10  # given numbers are multiples of 1 / BITS, which float32 holds exactly
TASKS = ((1, 2, 0), (0, 1, 2), (1, 2, 0))  # Memformer's, of every lane, by segment
TYPES = {"f": ("F64", "<f8"), "i": ("I64", "<i8"), "b": ("BOOL", "?")}
LISTED = Path(__file__).with_name("inner_values.txt")
FORWARD = "\ndef forward(params, config, tokens, state"  # of a model with a memory


# ----------------------------------------------------------------------------
# what is given: random numbers
def on_grid(array: np.ndarray) -> np.ndarray:
    """A float array rounded to multiples of 1 / BITS; others as they are."""
    return np.round(array * BITS) / BITS if array.dtype.kind == "f" else array


def random_case(
    reference: ModuleType, config: Any, rng: np.random.Generator, tasks: tuple | None = TASKS
) -> Case:
    """Random parameters, state and segments; kinds of Memformer's tasks by segment, or None."""
    params = reference.init_params(config, rng)
    # Away from 0 and 1, so that every term has an effect
    params = {n: on_grid(p + 0.3 * rng.standard_normal(p.shape)) for n, p in params.items()}
    fresh = reference.initial_state(params, config, LANES)
    state = fresh._make(random_field(field, config, rng) for field in fresh)
    module = module_of(reference, "Task")
    if not hasattr(module, "Task") or config.encoder_layers == 0:
        tasks = None
    segments: list = []
    for k in range(SEGMENTS):
        task = random_task(module, config, tasks[k], rng) if tasks and tasks[k] else None
        segments.append(random_segment(config, k, segments, rng)._replace(task=task))
    return Case(reference, config, params, state, segments)


def random_field(field: np.ndarray, config: Any, rng: np.random.Generator) -> np.ndarray:
    """A state's field in mid-document; a flag is false in the last lane."""
    if field.dtype.kind == "b":
        return (np.arange(LANES) < LANES - 1)[: field.size]
    if field.dtype.kind == "i":
        return rng.integers(config.vocabulary, size=field.shape)
    return on_grid(field + rng.standard_normal(field.shape))


def random_segment(config: Any, k: int, before: list, rng: np.random.Generator) -> Segment:
    """Segment k: lane 2 starts a document at the first, lane 1 at the second.

    Lane 2 ends with padding. The last window of a pretrained recurrence is shorter.
    """
    overlap = getattr(config, "overlap", 0)
    is_last = k == SEGMENTS - 1
    reads_short_ones = hasattr(config, "max_positions")
    length = config.segment
    if is_last and reads_short_ones:
        length = max(1, length - 2)
    tokens, targets = rng.integers(config.vocabulary, size=(2, LANES, length))
    scored = rng.random(tokens.shape) < 0.8
    starts = np.arange(LANES) == STARTS[k]
    if k and overlap:  # as windows overlap: read again, not scored again
        carried = ~starts
        tokens[carried, :overlap] = before[-1].tokens[carried, -overlap:][:, :length]
        targets[carried, :overlap] = before[-1].targets[carried, -overlap:][:, :length]
        scored[carried, :overlap] = False
    if is_last:
        scored[2, -2:] = False
    return Segment(tokens, targets, scored, starts)


def random_task(
    module: ModuleType, config: Any, kinds: tuple, rng: np.random.Generator
) -> NamedTuple:
    """A Task of random tokens with a kind for each lane; infilling lanes have padding."""
    n = config.segment
    reading, prompt = rng.integers(config.vocabulary, size=(2, LANES, n))
    readable = np.ones((LANES, n), bool)
    infilling = module.TASKS.index("infilling")
    for lane in np.flatnonzero(np.array(kinds) == infilling):
        reading[lane, n // 2] = config.special("mask")
        readable[lane, n // 2 + 1 + lane % 2 :] = False
    return module.Task(np.array(kinds), reading, readable, prompt)


def given_of(case: Case) -> dict:
    """{name: array} of what a port is given."""
    given = named("state/", case.state)
    given |= {f"param/{name}": value for name, value in case.params.items()}
    for k, segment in enumerate(case.segments):
        given |= named(f"{k}/", segment._replace(task=None))
        if segment.task:
            given |= named(f"{k}/task.", segment.task)
        del given[f"{k}/task"]
    return {GIVEN + name: array for name, array in given.items()}


# ----------------------------------------------------------------------------
# values inside a layer: local variables of functions, and in which order they came to be
class Listed(NamedTuple):
    """A line of inner_values.txt."""

    calls: re.Pattern  # of "/forward[0]/layer_forward[1]", with the number of calls inside each
    names: dict  # {local variable: name}; "return.0" is the first of what a function returns
    last: bool  # the last such call counts, not the first


def inner_values(paper: str, case: str) -> tuple[list[Listed], list[Listed]]:
    """The lines of a paper and a case, forward and backward; of all cases if case is "".

    Below a paper and its cases stand functions, each called by the one before it or further down,
    directly after ">", in its second call if [1], in its last one if [-1]. "<" is backward.
    """
    forward = []
    backward = []
    shown = False
    for line in LISTED.read_text().strip().splitlines():
        if not line.startswith(" "):
            of, *cases = line.split()
            is_named = any(fnmatch(case, pattern) for pattern in cases)
            shown = of == paper and (is_named or case == "")
        elif shown and "<" in line:
            backward.append(listed(line.replace("<", ""), "backward"))
        elif shown:
            forward.append(listed(line, "forward"))
    return forward, backward


def listed(line: str, direction: str) -> Listed:
    """A line, of functions whose names end with the direction."""
    functions, _, values = line.partition(": ")
    pattern = "/"
    for function in functions.split():
        name, _, number = function.lstrip(">").partition("[")
        index = r"\d+" if number in ("", "-1]") else number[:-1]
        between = "" if function.startswith(">") or pattern == "/" else "(?:.*/)?"
        pattern += rf"{between}{name}_{direction}\[{index}\]/"
    pairs = (value.rpartition("=") for value in values.split(", "))
    names = {local or own: own for local, _, own in pairs}
    return Listed(re.compile(rf"{pattern[:-1]}$"), names, "[-1]" in functions)


@contextlib.contextmanager
def noting(reference: ModuleType, note: Callable) -> Iterator[Callable]:
    """Inside the block: a function that makes parameters call note(name) when they are read."""
    subtree = reference.subtree

    class Noting(dict):
        prefix = ""

        def __getitem__(self, name: str) -> np.ndarray:
            note(self.prefix + name)
            return super().__getitem__(name)

    def noting_subtree(params: dict, prefix: str) -> dict:
        part = Noting(subtree(params, prefix))
        part.prefix = getattr(params, "prefix", "") + prefix
        return part

    vars(reference)["subtree"] = noting_subtree
    try:
        yield Noting
    finally:
        vars(reference)["subtree"] = subtree


def part_of(values: Any, path: str) -> Any:
    """What a path names, None if it is missing.

    "projected.query" is values["projected"]["query"], "return.0" the first of a tuple.
    """
    for part in path.split("."):
        if values is None:
            return None
        values = values.get(part) if isinstance(values, dict) else values[int(part)]
    return values


def recorded(lines: list[Listed], reference: ModuleType, run: Callable, note: Callable) -> dict:
    """{(number of the outermost call, name): array} of what lines name, while run() calls.

    The values are those of a reference's functions when they return. note(name) is called when a
    value comes to be.
    """
    files = {module.__file__ for module in modules_of(reference)}
    stack = [("", 0, Counter(), [])]
    found = {}

    def in_function(frame: FrameType, event: str, result: Any) -> Callable:
        _, number, _, wanted = stack[-1]
        values = frame.f_locals | {"return": result} if event == "return" else frame.f_locals
        for line in wanted:
            for local, name in line.names.items():
                value = part_of(values, local)
                if value is None:
                    continue
                note(name)
                key = (number, name)
                is_first = key not in found
                if event == "return" and (line.last or is_first):
                    # -inf is the score of a hidden key
                    found[key] = np.where(np.isfinite(value), value, 0)
        if event == "return":
            stack.pop()
        return in_function

    def on_call(frame: FrameType, event: str, result: Any) -> Callable | None:
        code = frame.f_code
        if code.co_filename not in files or code.co_name.startswith("<"):
            return None
        outer, number, inside, _ = stack[-1]
        if not outer:
            number = inside[code.co_name]
        calls = f"{outer}/{code.co_name}[{inside[code.co_name]}]"
        inside[code.co_name] += 1
        wanted = [line for line in lines if line.calls.search(calls)]
        stack.append((calls, number, Counter(), wanted))
        return in_function

    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def hidden_of(paper: str, config: Any, inner: dict) -> dict:
    """{value inside a layer: mask of the query-key pairs that count}, for the values in inner.

    Where it hides a key, 0 is written. It is the right mask, if a reference was changed too.
    """
    reference = importlib.import_module(f"reference.{paper}")
    if hasattr(reference, "tile_mask"):
        mask = reference.tile_mask(getattr(config, "window", config.segment))
        return {"position_bias": mask, "similarity": mask}
    masks = {}
    if hasattr(config, "compressed_memory"):
        for name in {"scores_by_distance_shifted", "scores"} & inner.keys():
            # a layer may have fewer keys than the config's rows
            queries, keys = inner[name].shape[-2:]
            masks[name] = reference.causal_mask(queries, keys)
    return masks


def inside_of(case: Case, paper: str, lines: list[Listed]) -> tuple[dict, list]:
    """({name: array} inside a layer of segment 0, their gradients' names in backward order).

    Among these names are those of the parameters' gradients.
    """
    reference, config, params, state, segments = case
    order: dict = {}  # a gradient's name: None

    def read() -> None:
        with noting(reference, lambda name: order.setdefault(f"grad/{name}")) as noted:
            rollout_forward(reference, noted(params), config, segments[:1], state)

    found = recorded(lines, reference, read, lambda name: order.setdefault(f"inner_grad/{name}"))
    names = dict.fromkeys(name for line in lines for name in line.names.values())
    inner = {name: found[0, name] for name in names if (0, name) in found}
    if "decoded" in inner:
        inner["decoded"] = inner["decoded"].reshape(inner["evicted"].shape)
    for name, mask in hidden_of(paper, config, inner).items():
        if name in inner:
            inner[name] = np.where(mask, inner[name], 0)
    order |= {f"grad/{name}": None for name in reversed(params)}  # and those of no tokens
    return inner, [*reversed(order)]


# ----------------------------------------------------------------------------
# what a port computes
def rows_of(case: Case, name: str, detailed: bool) -> dict:
    """{name: array} of all that a port should compute, in the order of computation.

    Each segment's own gradients and those inside a layer are left out if not asked for.
    """
    reference, config, params, state, segments = case
    paper = reference.__name__.split(".")[-1]
    forward, backward = inner_values(paper, name)
    inner, order = inside_of(case, paper, forward)
    rows = {INNER + key: value for key, value in inner.items()}
    computed, caches, _ = rollout_forward(reference, params, config, segments, state)
    rows |= computed

    steps: list = []

    def run() -> None:
        steps.extend(segments_backward(reference, params, config, caches))

    inside = recorded(backward, reference, run, lambda name: None)
    total: dict = {}
    for step, (parts, dstate) in enumerate(steps):
        k = len(segments) - 1 - step
        prefix = f"{k}/" if k else ""
        own: dict = {}
        for part in parts:
            reference.add_into(own, part)
        reference.add_into(total, own)
        gradients = own if k else total
        found = {f"grad/{key}": value for key, value in gradients.items()}
        if k:
            found |= {f"inner_grad/{key}": inside[at, key] for at, key in inside if at == step}
        if detailed or k == 0:
            rows |= {prefix + key: found[key] for key in order if key in found}
        rows |= gradients_of_state(f"{prefix}grad_state/", state, dstate)
    return rows


def gradients_of_state(prefix: str, state: NamedTuple, dstate: NamedTuple) -> dict:
    """{prefix + field: gradient}; tokens and flags have none."""
    rows = named(prefix, dstate)
    floats = [name for name, field in state._asdict().items() if field.dtype.kind == "f"]
    return {prefix + name: rows[prefix + name] for name in floats}


# ----------------------------------------------------------------------------
# files, and the command line
def write(path: Path, rows: dict, about: dict) -> None:
    """A safetensors file of the rows that are not empty, in their order, and PATH.json about it."""
    texts = {key: text_of(value) for key, value in about.items() if key != "flags"}
    header: dict = {"__metadata__": texts}
    blocks = []
    end = 0
    for name, row in rows.items():
        if row.size:
            kind, dtype = TYPES[row.dtype.kind]
            blocks.append(row.astype(dtype).tobytes())  # row-major
            begin, end = end, end + len(blocks[-1])
            header[name] = {"dtype": kind, "shape": row.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))
    path.with_suffix(".json").write_text(json.dumps(about) + "\n")


def text_of(value: Any) -> str:
    """A value of the metadata, which holds texts alone."""
    return value if isinstance(value, str) else json.dumps(value)


def about(paper: str, name: str, config: Any) -> dict:
    """What stands beside the tensors."""
    return {"paper": paper, "case": name, "config": dataclasses.asdict(config)}


def generate(model: str, text: str, seed: int, out: Path) -> bool:
    """Write a case of a model's config in JSON; returns True."""
    models = sorted(path.stem for path in LISTED.parent.glob("*.py") if FORWARD in path.read_text())
    if model not in models:
        raise CheckError(f"--model {model} is none of {', '.join(models)}")
    if out.suffix != ".safetensors":  # a .json beside it has the same name
        raise CheckError(f"--out {out}: its name must end in .safetensors")
    if out.exists() or out.with_suffix(".json").exists():
        raise CheckError(f"{out} or its .json is there; give --out another name")
    reference = importlib.import_module(f"reference.{model}")
    try:
        config = reference.Config(**fields_of(text))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckError(f"--config {text}: {error}") from None
    case = random_case(reference, config, np.random.default_rng(seed))
    rows = given_of(case) | rows_of(case, "", detailed=True)
    write(out, rows, about(model, out.stem, config))
    print(f"{out}: {len(rows)} tensors")
    return True


def main(argv: list | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m reference.vectors", description="Vectors of a config."
    )
    parser.add_argument("--model", required=True, help="a reference, such as memformer")
    parser.add_argument("--config", required=True, help="its Config's fields, in JSON")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")
    parser.add_argument("--out", required=True, type=Path, help="the file, NAME.safetensors")
    options = parser.parse_args(argv)
    return exit_code(
        "reference.vectors",
        lambda: generate(options.model, options.config, options.seed, options.out),
    )


if __name__ == "__main__":
    sys.exit(main())
