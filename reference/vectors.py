"""python -m reference.vectors --model NAME --config JSON --seed N --out FILE: vectors of any sizes.

A file has what a port is given and what it has to compute, in the order of computation: results by
segment, then gradients from the last segment to the first. FILE.json has the config. The cases of
docs/vectors have values inside a layer, too (tests/tools/inner.py). docs/porting.md names the
tensors. It needs NumPy alone.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from reference.check import GIVEN, LANES, SEGMENTS, STARTS, VERSION, CheckError, exit_code
from reference.gradients import Case, fields_of
from reference.rollout import Segment, named, rollout_forward, segments_backward

BITS = 2**10  # given numbers are multiples of 1 / BITS, which float32 holds exactly
TYPES = {"f": ("F64", "<f8"), "i": ("I64", "<i8"), "b": ("BOOL", "?")}


# ----------------------------------------------------------------------------
# what is given: random numbers
def on_grid(array: np.ndarray) -> np.ndarray:
    """A float array rounded to multiples of 1 / BITS; another array is returned as it is."""
    return np.round(array * BITS) / BITS if array.dtype.kind == "f" else array


def random_case(
    reference: ModuleType, config: Any, rng: np.random.Generator, task_of: Callable | None = None
) -> Case:
    """Random parameters, state and segments; task_of(number of a segment) is its task, if given."""
    params = reference.init_params(config, rng)
    # Away from 0 and 1, so that every term has an effect
    params = {n: on_grid(p + 0.3 * rng.standard_normal(p.shape)) for n, p in params.items()}
    fresh = reference.initial_state(params, config, LANES)
    state = fresh._make(random_field(field, config, rng) for field in fresh)
    segments: list = []
    for k in range(SEGMENTS):
        task = task_of(k) if task_of else None
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
    length = config.segment
    if is_last and hasattr(config, "max_positions"):
        length = max(1, length - 2)
    tokens, targets = rng.integers(config.vocabulary, size=(2, LANES, length))
    scored = rng.random(tokens.shape) < 0.8
    starts = np.arange(LANES) == STARTS.get(k)
    if k and overlap:  # as windows overlap: read again, not scored again
        carried = ~starts
        tokens[carried, :overlap] = before[-1].tokens[carried, -overlap:][:, :length]
        targets[carried, :overlap] = before[-1].targets[carried, -overlap:][:, :length]
        scored[carried, :overlap] = False
    if is_last:
        scored[2, -2:] = False
    return Segment(tokens, targets, scored, starts)


def given_of(case: Case) -> dict:
    """{name: array} of what a port is given."""
    given = named("state/", case.state)
    given |= {f"param/{name}": value for name, value in case.params.items()}
    for k, segment in enumerate(case.segments):
        given |= named(f"{k}/", segment)
        task = given.pop(f"{k}/task")
        if task:
            given |= named(f"{k}/task.", task)
    return {GIVEN + name: array for name, array in given.items()}


# ----------------------------------------------------------------------------
# what a port computes
def rows_of(case: Case) -> dict:
    """{name: array} of all that a port should compute, in the order of computation."""
    reference, config, params, state, segments = case
    rows, caches, _ = rollout_forward(reference, params, config, segments, state)
    steps = segments_backward(reference, params, config, caches)
    order = [f"grad/{name}" for name in reversed(params)]
    return rows | gradient_rows(case, steps, order, {}, range(len(segments)))


def gradient_rows(
    case: Case, steps: Iterable, order: list, inside: dict, detailed: Collection
) -> dict:
    """{name: gradient} of the objective, from the last segment to the first, in this order.

    inside has the gradients of values inside a layer, {(step, name): gradient}. A segment that is
    not detailed has the gradient of its state alone.
    """
    rows: dict = {}
    total: dict = {}
    for step, (own, dstate) in enumerate(steps):
        k = len(case.segments) - 1 - step
        prefix = f"{k}/" if k else ""
        case.reference.add_into(total, own)
        found = {f"grad/{key}": value for key, value in (own if k else total).items()}
        if k:
            found |= {f"inner_grad/{key}": inside[at, key] for at, key in inside if at == step}
        if k in detailed:
            rows |= {prefix + key: found[key] for key in order if key in found}
        for name, field in dstate._asdict().items():
            if getattr(case.state, name).dtype.kind == "f":  # tokens and flags have none
                rows[f"{prefix}grad_state/{name}"] = field
    return rows


# ----------------------------------------------------------------------------
# files, and the command line
def write(path: Path, rows: dict, about: dict, types: dict = TYPES) -> None:
    """A safetensors file of the rows that are not empty, in their order, and PATH.json about it."""
    texts = {}
    for key, value in about.items():
        if key != "flags":
            texts[key] = value if isinstance(value, str) else json.dumps(value)
    header: dict = {"__metadata__": {"version": str(VERSION)} | texts}
    blocks = []
    end = 0
    for name, row in rows.items():
        if row.size:
            kind, dtype = types[row.dtype.kind]
            blocks.append(row.astype(dtype).tobytes())  # row-major
            begin, end = end, end + len(blocks[-1])
            header[name] = {"dtype": kind, "shape": row.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    write_whole(path.with_suffix(".json"), json.dumps(about).encode() + b"\n")
    write_whole(path, len(text).to_bytes(8, "little") + text + b"".join(blocks))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all; raises CheckError if it cannot."""
    unfinished = path.with_name(f"{path.name}.writing")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CheckError(f"cannot write {path}: {error}; give another --out") from None


def about(paper: str, name: str, config: Any) -> dict:
    """What is written beside the tensors."""
    return {"paper": paper, "case": name, "config": dataclasses.asdict(config)}


def generate(model: str, text: str, seed: int, out: Path) -> bool:
    """Write a case of a model's config in JSON; returns True."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    models = [path.stem for path in files if "\nclass Config:" in path.read_text(encoding="utf-8")]
    if model not in models:
        raise CheckError(f"--model {model} is none of {', '.join(models)}")
    if out.suffix != ".safetensors":  # a .json beside it has the same name
        raise CheckError(f"--out {out}: its name must end in .safetensors")
    if any(path.exists() or path.is_symlink() for path in (out, out.with_suffix(".json"))):
        raise CheckError(f"{out} or its .json is there; give --out another name")
    reference = importlib.import_module(f"reference.{model}")
    try:
        config = reference.Config(**fields_of(text))
        case = random_case(reference, config, np.random.default_rng(seed))
        rows = given_of(case) | rows_of(case)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckError(f"--config {text}: {error}") from None
    write(out, rows, about(model, out.stem, config))
    print(f"{out}: {len(rows)} tensors")
    return True


def main(argv: list | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m reference.vectors", description="Vectors of a config."
    )
    add = parser.add_argument
    add("--model", required=True, help="a reference, such as memformer")
    add("--config", required=True, help="its Config's fields, in JSON")
    add("--seed", type=int, default=0, help="of all random numbers (default: 0)")
    add("--out", required=True, type=Path, help="the file, NAME.safetensors")
    options = parser.parse_args(argv)

    def work() -> bool:
        return generate(options.model, options.config, options.seed, options.out)

    return exit_code("reference.vectors", work)


if __name__ == "__main__":
    sys.exit(main())
