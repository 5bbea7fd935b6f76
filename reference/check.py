"""python -m reference.check [--stage NAME] [--strict] [--json] VECTORS THEIRS: is a port right?

VECTORS is a file of docs/vectors, or a folder of them. THEIRS is a safetensors file with tensors of
the same names, or a folder with files of the same names. Everything that does not begin with
`given/` is compared. Operators, values inside a layer, their gradients and those of a single
segment may be left out; they make it say more exactly where a mistake is. Of a file all tensors are
shown. Exit code 0 if all agree, 1 if not, 2 if a file cannot be read. It needs NumPy, and nothing
else of this project. docs/porting.md tells how to use it.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VERSION = 1  # of docs/vectors
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
# Of the largest magnitude in a tensor; how they were measured stands in docs/porting.md
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2}
SMALL = 1e-6  # float32's rounding, in a tensor of float64
LARGE = 1e-3  # what no rounding is
NOTHING = 1e-15  # a tensor without a larger number is a sum that cancels: zero, and its rounding
GIVEN = "given/"
INNER = "inner/"
REPLAY = "replay/"
OPTIONAL = r"operator/|inner/|\d+/.*grad|replay/"  # what may be left out
STAGES = {  # in the order of work: what a name begins with
    "operators": "operator/",
    "logits": "inner/|0/lo",
    "state": r"\d+/(lo|au|ne)|objective",
    "gradients": r"(\d+/(inner_)?)?grad",
    "steps": "sgd/|adamw/",
    "replay": REPLAY,
}
ORDER = [*STAGES]
FORWARD = 2  # the last stage of the forward pass
# By lane: their axis 0. A document starts in lane 2 at segment 0, in lane 1 at segment 1
BY_LANE = r"(\d+/)?(inner_grad/|inner/(?!position_bias|gate$|distance_key)|logits|next|grad_state)"
LANES = 3
SEGMENTS = 3
STARTS = {0: 2, 1: 1}  # the lane that starts, by segment


class Row(NamedTuple):
    """The comparison of one tensor."""

    name: str
    error: float  # relative to the largest expected magnitude; infinite if it cannot be compared
    tolerance: float
    words: str
    lanes: tuple = ()  # those that are wrong, if the tensor has three
    spread: float = 0.0  # root of the mean square, relative like the error

    @property
    def passes(self) -> bool:
        """Whether it agrees; NaN does not."""
        return self.error <= self.tolerance

    @property
    def is_missing(self) -> bool:
        """Whether the port did not write it."""
        return self.words.startswith("missing")


class CheckError(Exception):
    """A file that cannot be read; the message says what to do."""


def load(path: Path) -> tuple[dict, dict]:
    """({name: array}, {key: text of the metadata}) of a safetensors file.

    Such a file is the length of a header in 8 bytes, the header in JSON, and the arrays.
    """
    if not Path(path).is_file():
        raise CheckError(f"{path}: no such file")
    arrays = {}
    try:
        content = Path(path).read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        metadata = header.pop("__metadata__", {})
        for name, about in header.items():
            first, last = about["data_offsets"]
            data = bytearray(content[begin + first : begin + last])  # which may be changed
            array = np.frombuffer(data, TYPES[about["dtype"]])
            arrays[name] = array.reshape(about["shape"])
    except Exception as error:  # of whatever stands in it
        raise CheckError(
            f"{path} is no safetensors file of {', '.join(TYPES)}; write one as docs/porting.md "
            f"says ({type(error).__name__}: {error})"
        ) from None
    return arrays, metadata


def compared(name: str, expected: np.ndarray, actual: np.ndarray) -> Row:
    """The Row of a tensor that both have."""
    tolerance = tolerance_of(actual.dtype)
    if expected.shape != actual.shape:
        return Row(name, np.inf, tolerance, f"shape {actual.shape}, expected {expected.shape}")
    expected = expected.astype(np.float64)
    actual = actual.astype(np.float64)
    not_finite = np.count_nonzero(~np.isfinite(actual))
    if not_finite:
        return Row(name, np.inf, tolerance, f"{not_finite} of {actual.size} NaN or infinite")

    scale = np.abs(expected).max()
    if scale < NOTHING:
        scale = 0.0
    # Of what is exactly zero, the error itself
    difference = np.abs(actual - expected) / (scale or 1.0)
    error = float(difference.max())
    index = np.unravel_index(difference.argmax(), difference.shape)
    where = ",".join(map(str, index))
    words = f"{error:.1e} at [{where}], at most {tolerance:.0e}"
    if scale == 0:
        words += ", expected exactly zero"
    elif error > max(tolerance, SMALL) and tolerance > 0:
        words += seen_in(expected, actual, max(tolerance, SMALL) * scale)
    lanes = ()
    if difference.shape[:1] == (LANES,) and re.match(BY_LANE, name):
        off = difference.reshape(LANES, -1).max(1) > tolerance
        lanes = tuple(np.flatnonzero(off).tolist())
    spread = float(np.sqrt((difference**2).mean()))
    return Row(name, error, tolerance, words, lanes, spread)


def seen_in(expected: np.ndarray, actual: np.ndarray, near: float) -> str:
    """How a wrong tensor differs from what is expected, or ""; differences up to near are none."""
    if np.abs(actual).max() <= near:
        return ", all of it is zero"
    difference = actual - expected
    factor = (actual * expected).sum() / (expected**2).sum()
    if np.abs(actual - factor * expected).max() <= near:
        return f", {factor:.6g} times what is expected"
    for axis in range(expected.ndim):
        if np.abs(np.sort(actual, axis) - np.sort(expected, axis)).max() <= near:
            return f", the same numbers in another order of axis {axis}"
    lanes_and_rows = tuple({0, expected.ndim - 2})
    if expected.ndim > 2 and np.ptp(difference, lanes_and_rows).max() <= near:
        return ", off by the same in every row"
    nonzero = np.count_nonzero((expected == 0) & (np.abs(actual) > near))
    zero = np.count_nonzero((actual == 0) & (np.abs(expected) > near))
    words = f", {nonzero} that should be exactly zero are not" if nonzero else ""
    return f"{words}, {zero} are zero and should not be" if zero else words


def tolerance_of(dtype: np.dtype) -> float:
    """The largest relative error of a type; integers and booleans must be equal."""
    return 0.0 if dtype.kind in "iub" else TOLERANCES[str(dtype)]


def stage_of(name: str) -> str:
    """The stage of work in which a tensor is computed."""
    return next(stage for stage, pattern in STAGES.items() if re.match(pattern, name))


def wanted(expected: dict, stage: str) -> dict:
    """The tensors that are compared up to a stage, or all if it is ""; with those of replay."""
    found = {name: row for name, row in expected.items() if not name.startswith(GIVEN)}
    if any(name.startswith(REPLAY) for name in found):  # whose gradients must be the same
        found |= {REPLAY + name: row for name, row in found.items() if name.startswith("grad")}
    last = ORDER.index(stage or "replay")
    return {name: row for name, row in found.items() if ORDER.index(stage_of(name)) <= last}


def compare(expected: dict, actual: dict, stage: str = "") -> list[Row]:
    """A Row for each tensor that a port computes up to a stage, in the order of computation.

    That is the order in which they stand in the file.
    """
    rows = []
    for name, row in wanted(expected, stage).items():
        is_asked_for = stage == "replay" and name.startswith(REPLAY)
        is_optional = re.match(OPTIONAL, name) and not is_asked_for
        if name in actual:
            rows.append(compared(name, row, actual[name]))
        elif not is_optional:
            rows.append(Row(name, np.inf, 0.0, f"missing, shape {row.shape}"))
    return rows


def first_wrong(rows: list[Row]) -> Row:
    """The first tensor that is wrong, or else the first that is missing; not all may agree."""
    wrong = [row for row in rows if not row.passes]
    first = min(wrong, key=lambda row: row.is_missing)
    if "initial" in first.name:  # a part of the gradient by the state, which is behind it
        number = segment_of(first.name)
        states = [row for row in wrong if "grad_state/" in row.name and not row.is_missing]
        return next((row for row in states if segment_of(row.name) == number), first)
    return first


def hint_of(vectors: Path, row: Row) -> str:
    """What to look at if this tensor of a file is the first that is wrong.

    That is what its lanes and its size say, and how it is computed; "" if nothing is known.
    """
    segment = segment_of(row.name)
    start = STARTS.get(segment, LANES)
    others = tuple(lane for lane in range(LANES) if lane != start)
    said = ["its name, and whether a line makes it"] if row.is_missing else []
    if row.words.startswith("shape"):
        said += ["the order of axes, or how many rows"]
    if row.tolerance == TOLERANCES["float64"] and row.error < SMALL:
        said += ["an operation in float32, or an epsilon in another place?"]
    if row.lanes == (start,):
        said += [f"lane {start} alone is wrong, where a document starts in segment {segment}"]
    if start < LANES and row.lanes == others:
        said += [f"lane {start} alone is right, which starts a document"]
    folder = vectors.resolve().parent  # of the paper, also if VECTORS is a name alone
    hints = described(folder.parent / "hints.json")
    names = (row.name, f"{vectors.stem}/{row.name}")
    for pattern, words in [*hints.get(folder.name, []), *hints.get("", [])]:
        if any(re.match(pattern, name) for name in names):
            return "; ".join([*said, words])
    return "; ".join(said)


def read_both(vectors: Path, theirs: Path, stage: str) -> tuple[list[Row], list]:
    """(the rows that are compared, names that the vectors do not have) of two files."""
    expected, _ = load(vectors)
    actual, _ = load(theirs)
    if not any(name.startswith(GIVEN) for name in expected):
        raise CheckError(f"{vectors} is no file of docs/vectors; give VECTORS before THEIRS")
    rows = compare(expected, actual, stage)
    asked = wanted(expected, stage)
    if asked and not rows:
        raise CheckError(f"{theirs} has no name that {vectors} has, such as {next(iter(asked))}")
    if not rows:
        raise CheckError(
            f"{vectors} asks {theirs} for nothing up to the stage {stage}; give a later --stage, "
            "or docs/vectors/operators for operators"
        )
    return rows, sorted(actual.keys() - expected.keys() - wanted(expected, "").keys())


def flags_of(vectors: Path, rows: list[Row]) -> list:
    """Known mistakes that give these results: first wrong tensor, its errors, number of others.

    The .json beside a case lists them: {tensor: {flag: mark_of its rows}}.
    """
    flags = described(vectors.with_suffix(".json")).get("flags", {})
    name, mark = mark_of(rows)
    known = flags.get(name, {})
    return [flag for flag, other in known.items() if is_near(mark, other)]


def mark_of(rows: list[Row]) -> tuple:
    """The first wrong tensor, and how wrong rows are.

    [its error, its root mean square, how many others of its stage are clearly wrong]; an error is
    10^9 if it cannot be compared.
    """
    first = first_wrong(rows)
    stage = stage_of(first.name)
    asked_for = [row for row in rows if not re.match(OPTIONAL, row.name)]
    others = sum(row.error > LARGE and stage_of(row.name) == stage for row in asked_for)
    return first.name, [*(float(f"{min(each, 1e9):.3g}") for each in first[1::4]), others]


def is_near(mark: list, known: list) -> bool:
    """Whether a mark is that of a known mistake, to one in a hundred."""
    pairs = zip(mark, known, strict=True)
    return mark[2] == known[2] and all(abs(one - two) <= 0.01 * two for one, two in pairs)


def described(path: Path) -> dict:
    """What a .json of the vectors says; nothing if it is not there."""
    return json.loads(path.read_bytes()) if path.is_file() else {}


def pairs_of(vectors: Path, theirs: Path) -> list[tuple[Path, Path]]:
    """[(file of vectors, file of theirs or none)], of two files or of all names in a folder."""
    if vectors.is_file():
        return [(vectors, theirs / vectors.name if theirs.is_dir() else theirs)]
    if not vectors.is_dir():
        raise CheckError(f"{vectors}: no such file or folder")
    pairs = [(path, theirs / path.name) for path in sorted(vectors.glob("*.safetensors"))]
    if not pairs:
        raise CheckError(
            f"{vectors} has no vectors; give a paper's folder, such as docs/vectors/compressive"
        )
    if not any(other.is_file() for _, other in pairs):
        raise CheckError(f"{theirs} has none of the files of {vectors}: {pairs[0][0].name} ...")
    return pairs


def verdict_of(vectors: Path, theirs: Path, stage: str, strict: bool) -> dict:
    """Compare a file with another, or the files of one name in two folders, up to the stage.

    Prints and returns the verdict. If strict, a case that is missing does not agree.
    """
    pairs = pairs_of(vectors, theirs)
    written = [pair for pair in pairs if pair[1].is_file() or vectors.is_file()]
    failed = []  # (place, file, rows)
    last = 0  # stage that is compared
    for path, other in written:
        rows, unknown = read_both(path, other, stage)
        for row in rows if vectors.is_file() else ():
            mark = "" if row.passes else "  FAIL"
            print(f"  {row.name:<52} {row.words}{mark}")
        last = max(last, *(ORDER.index(stage_of(row.name)) for row in rows))
        count = sum(not row.passes for row in rows)
        if count:
            failed.append((place_of(path, rows), path, rows))
            print(f"{path.stem}: {count} of {len(rows)} tensors fail, {first_wrong(rows).name}")
        if unknown:
            print(f"{path.stem}: not in the vectors: {', '.join(unknown[:5])}")
    last = min(last, ORDER.index(stage or "steps"))  # all of replay is asked for by its stage alone
    absent = len(pairs) - len(written)
    print(
        f"{len(written) - len(failed)} of {len(written)} cases agree; {absent} are not in {theirs}"
    )
    verdict = {"agrees": not (failed or (strict and absent)), "version": VERSION}
    verdict |= {"cases": len(written), "missing": absent, "level": ORDER[last]}
    if not failed:
        if strict and absent:
            print(f"--strict asks for all cases: write the {absent} that are not in {theirs}")
        else:
            print(f"all agree: vectors {VERSION}, {vectors.resolve().name}, level {ORDER[last]}")
        return verdict | {"begin_with": None}
    _, path, rows = min(failed, key=lambda each: each[:2])
    return verdict | {"begin_with": begin_with(path, rows)}


def place_of(path: Path, rows: list[Row]) -> tuple:
    """Sort key of a file: when its first wrong tensor is computed; missing tensors come last.

    Among files wrong in the same segment and pass, the one with the most values inside a layer
    comes first, as it locates the mistake best, then the largest.
    """
    first = first_wrong(rows)
    stage = max(ORDER.index(stage_of(first.name)), FORWARD)
    number = segment_of(first.name)
    backwards = stage_of(first.name) == "gradients"  # which begin with the last segment
    inside = sum(row.name.startswith(INNER) for row in rows)
    place = (first.is_missing, stage, -number if backwards else number)
    return *place, -inside, -path.stat().st_size


def segment_of(name: str) -> int:
    """The number of a tensor's segment, 0 if its name has none."""
    segment = name.partition("/")[0]
    return int(segment) if segment.isdigit() else 0


def begin_with(path: Path, rows: list[Row]) -> dict:
    """Print the stage that is not done, and what to look at in this file; returns the latter."""
    first = first_wrong(rows)
    now = stage_of(first.name)
    hint = hint_of(path, first)
    print(f"stage {ORDER.index(now) + 1} of {len(STAGES)}, {now}, is not done")
    print(f"begin with {path.name}, {first.name}: {first.words}")
    print(f"look at: {hint or 'how it is computed; no hints.json stands above its folder'}")
    if all(row.passes or row.name.startswith(INNER) for row in rows):
        print(f"only {INNER} values are wrong: all that is asked for agrees")
    for flag in flags_of(path, rows)[:3]:
        print(f"a known mistake that begins there: {flag} (docs/mistakes.md)")
    error = first.error if np.isfinite(first.error) else None
    return {"file": path.name, "tensor": first.name, "error": error, "hint": hint}


def exit_code(name: str, work: Callable[[], bool]) -> int:
    """0 if work() is true, and 1 if not.

    It is 2, with one line, if a file cannot be used; 1 if nobody reads the output any more.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it is None if it was closed
            stream.reconfigure(errors="backslashreplace")
    try:
        right = work()
        print(end="", flush=True)
        return 0 if right else 1
    except CheckError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in: python -m reference.check ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        what = error.filename or "the output"
        print(f"{name}: cannot use {what}: {error.strerror}; give another", file=sys.stderr)
        return 2


def main(argv: list | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = "Compare what a port wrote with docs/vectors, tensor by tensor (docs/porting.md)."
    parser = argparse.ArgumentParser("python -m reference.check", description=words)
    add = parser.add_argument
    add("vectors", metavar="VECTORS", type=Path, help="a file of docs/vectors, or a folder of them")
    add("theirs", metavar="THEIRS", type=Path, help="what the port wrote: a file, or a folder")
    add("--stage", choices=STAGES, default="", help="compare what is computed up to this stage")
    add("--strict", action="store_true", help="fail if a case of VECTORS is not in THEIRS")
    add("--json", action="store_true", help="print one JSON object; text is on standard error")
    options: Any = parser.parse_args(argv)

    def work() -> bool:
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            verdict = verdict_of(options.vectors, options.theirs, options.stage, options.strict)
        if options.json:
            print(json.dumps(verdict))
        return verdict["agrees"]

    return exit_code("reference.check", work)


if __name__ == "__main__":
    sys.exit(main())
