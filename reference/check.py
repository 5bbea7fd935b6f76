"""python -m reference.check [--stage NAME] [--strict] [--json] VECTORS THEIRS: is a port right?

VECTORS is a file of docs/vectors, or a folder of them. THEIRS is a safetensors file with tensors of
the same names, or a folder with files of the same names. Everything that does not begin with
`given/` is compared. Operators, values inside a layer, their gradients and those of a single
segment may be left out; they make it say more exactly where a mistake is. A file's table has all
tensors; of a folder and of a stage there are at most 20 lines. Exit code 0 if all agree, 1 if not,
2 if a file cannot be read. It needs NumPy, and nothing else of this project. docs/porting.md tells
how to use it.
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
LINES = 12  # of failures that are shown, if not all are
HINTS = {  # for a name that is wrong first: what to look at
    "operator/.*/d": "the formula above NAME_backward in reference/PAPER.py",
    "operator/": "NAME_forward in reference/PAPER.py; the conventions in docs/porting.md",
    "inner/sinusoids": "all sines, then all cosines; base 10,000; row t is of distance K - 1 - t",
    "inner/(layer_in|.*normed|ident)": "the norm: mean, epsilon; embedding unscaled; which states",
    "inner/position_bias": "buckets of the distance, a row for each head; not yet scaled",
    "inner/distance_key": "sinusoids of signed distances, from far to near; W_R is (out, in)",
    "inner/scores_by_distance$": "v is added to the query; rows of distances; the product's axes",
    "inner/scores_by": "the shift: query i is at C + M + i; sign, clipping; hidden keys are 0",
    "inner/.*(scores|similarity)": "u is added to the query; the shift; scaled or not; the mask",
    "inner/read_weights": "the state before its update; the scale; padding",
    "inner/.*weights": "1 / sqrt(E) or the learned scale; the mask: off by one, inverted; padding",
    "inner/(attention_over|decoded)": "no mask, positions or biases; which rows; oldest first",
    "inner/(attended|read$|local|found|states_from)": "which keys, and their own values; the scale",
    "inner/(attention_o|after_a)": "heads side by side; (out, in); a bias; the residual; epsilon",
    "inner/.*(mlp|gelu|layer_o|encoded)": "a bias; ReLU or GELU by tanh; the residual; epsilon",
    "inner/gate_input": "[own; seen], each with its heads side by side",
    "inner/(.*gate|states_after)": "a bias; sigmoid, tanh; + 1, - 1; whose share is g; a norm",
    "inner/(evicted|usage|new$)": "which layer's rows, oldest first; joined before cut; its order",
    "inner/new_slots": "the slot itself, raw; no output matrix, no residual",
    "inner/(mixed|pooled|layer_s)": "which layers, rows; before or after the last norm; the gate",
    "inner/inserted": "GELU after each hidden layer and not after the last; biases",
    "inner/": "matrices are (out, in), biases; heads side by side; unit length; a norm before",
    "0/logits": "1 / sqrt(D); the last norm; which row predicts; other layers, masks, positions",
    r"\d+/loss": "nats of what is scored, summed; the targets as they are given",
    r"\d+/next": "which rows are kept, oldest first; the raw state is carried; padding",
    r"\d+/auxiliary": "a mean over everything, one for each layer; data; the decoder's rows",
    r"\d+/logits": "how a state of another segment is read; padding; a shorter window",
    "objective": "divided by all that is scored; auxiliary losses by the segments",
    ".*grad_state": "all that reads it adds up; a lane that starts passes none on; the stops",
    ".*inner_grad/(new_slots|states_after|pooled|new$)": "it comes from the next segment: a stop?",
    ".*inner_grad/attention_over": "of a mean over everything: 2 / size; its own loss alone",
    ".*inner_grad/(.*gate)": "1 - g; the derivative of sigmoid or tanh; from the carry, too",
    ".*inner_grad/.*weights": "d weights = d out V^T, of the same keys; what reads them besides",
    ".*inner_grad/.*(scores|sim|position)": "softmax: w (dw - sum of w dw); the scale, once; sums",
    ".*inner_grad/.*(mlp|gelu)": "ReLU's or GELU's derivative where it was computed; W, not W^T",
    ".*inner_grad/.*value": "d value = weights^T d out; all that reads it",
    ".*inner_grad/.*(query|key)": "scores^T by the other; the scale; unit length's backward",
    ".*inner_grad": "all that reads it adds up, residuals too; the norm's backward; the stops",
    ".*grad.*initial": "lanes that start give it their gradient, and only they",
    ".*grad/embedding": "it is read and is the output: two gradients; the stops",
    ".*grad/.*key_bias": "exactly zero: softmax cancels it",
    ".*grad/.*norm": "dscale = sum of dy n, dbias = sum of dy; all that reads the norm adds up",
    ".*grad/.*compression": "its own loss alone, unless bptt; evicted rows are data; their order",
    ".*grad/.*(bias|scale|positions|gate)": "a sum over lanes, and over all places that use it",
    ".*grad": "dW = dy^T x over lanes and rows, of all places that use it; the stops",
    "sgd": "p - rate * gradient",
    "adamw": "gradients are right; see AdamW's line in docs/porting.md",
    "replay/[af]": "K - 1 calls of advance, before K of forward, the last segment first",
    "replay": "the same state before each segment as in the first pass; its gradient is handed on",
}
# By lane: their axis 0. A document starts in lane 2 at segment 0, in lane 1 at segment 1
BY_LANE = r"(\d+/)?(inner_grad/|inner/(?!position_bias|gate$|distance_key)|logits|next|grad_state)"
LANES = 3
STARTS = {0: 2, 1: 1}  # the lane that starts, by segment


class Row(NamedTuple):
    """The comparison of one tensor."""

    name: str
    error: float  # relative to the largest expected magnitude; infinite if it cannot be compared
    tolerance: float
    words: str
    lanes: tuple = ()  # those that are wrong, if the tensor has three

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
    end = 0
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
            end = max(end, last)
        after = len(content) - begin - end
        if after:
            raise ValueError(f"{after} bytes are left after the last tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckError(
            f"{path} is no safetensors file that NumPy can hold ({type(error).__name__}: {error})"
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
    if expected.size == 0:
        return Row(name, 0.0, tolerance, "of size zero")

    difference = np.abs(actual - expected)
    scale = np.abs(expected).max()
    error = float(difference.max() / (scale or 1.0))  # of what is exactly zero, the error itself
    index = np.unravel_index(difference.argmax(), difference.shape)
    where = ",".join(str(int(i)) for i in index)
    words = f"{error:.1e} at [{where}], {share_of(tolerance, error)}"
    if scale == 0:
        words += ", expected exactly zero"
    lanes = ()
    if difference.shape[:1] == (LANES,) and re.match(BY_LANE, name):
        off = difference.reshape(LANES, -1).max(1) > tolerance * (scale or 1.0)
        lanes = tuple(np.flatnonzero(off).tolist())
    return Row(name, error, tolerance, words, lanes)


def tolerance_of(dtype: np.dtype) -> float:
    """The largest relative error of a type; integers and booleans must be equal."""
    return 0.0 if dtype.kind in "iub" else TOLERANCES[str(dtype)]


def share_of(tolerance: float, error: float) -> str:
    """How much of the tolerance an error is, in words."""
    if tolerance == 0:
        return "must be equal" if error else "equal"
    share = error / tolerance
    return f"{share:.1%} of the tolerance" if share < 10 else f"{share:.0e} times the tolerance"


def stage_of(name: str) -> str:
    """The stage of work in which a tensor is computed; raises CheckError if it is of none."""
    for stage, pattern in STAGES.items():
        if re.match(pattern, name):
            return stage
    raise CheckError(f"{name} is no name of docs/vectors; restore the file that has it")


def wanted(expected: dict, stage: str) -> dict:
    """The tensors that are compared up to a stage, or all if it is ""; with those of replay."""
    found = {name: row for name, row in expected.items() if not name.startswith(GIVEN)}
    if any(name.startswith(REPLAY) for name in found):  # whose gradients must be the same
        found |= {REPLAY + name: row for name, row in found.items() if name.startswith("grad")}
    last = [*STAGES].index(stage or "replay")
    stages = [*STAGES][: last + 1]
    return {name: row for name, row in found.items() if stage_of(name) in stages}


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
        elif row.size and not is_optional:
            rows.append(Row(name, np.inf, 0.0, f"missing, shape {row.shape}"))
    return rows


def first_wrong(rows: list[Row]) -> Row | None:
    """The first tensor that is wrong, or else the first that is missing; None if all agree."""
    wrong = [row for row in rows if not row.passes]
    return min(wrong, key=lambda row: row.is_missing, default=None)


def hint_of(row: Row) -> str:
    """What to look at if this tensor is the first that is wrong."""
    if row.is_missing:
        return "the name; tensors that may be left out are in docs/porting.md"
    if row.tolerance == TOLERANCES["float64"] and row.error < SMALL:
        return "an operation in float32?"
    segment = segment_of(row.name)
    start = STARTS.get(segment, LANES)
    if row.lanes == (start,):
        return f"lane {start} alone is wrong, where a document starts in segment {segment}"
    shape = "the order of axes, or: " if row.words.startswith("shape") else ""
    words = shape + next(words for pattern, words in HINTS.items() if re.match(pattern, row.name))
    if start < LANES and row.lanes == tuple(lane for lane in range(LANES) if lane != start):
        words += f"; lane {start} alone is right, which starts a document"
    return words


def report(title: str, rows: list[Row], unknown: list, whole: bool) -> None:
    """Print the verdict, the first wrong tensor, and a table, whole or of some failures."""
    wrong = [row for row in rows if not row.passes]
    missing = sum(row.is_missing for row in wrong)
    print(f"{title}: {len(rows) - len(wrong)} of {len(rows)} tensors agree, {missing} missing")
    first = first_wrong(rows)
    if first:
        is_what = "missing" if first.is_missing else "wrong"
        print(f"  begin with {first.name}, the first that is {is_what}: {first.words}")
        print(f"  look at: {hint_of(first)}")
        if all(row.name.startswith(INNER) for row in wrong):
            print(f"  only {INNER} values are wrong: all that is asked for agrees")
    for row in rows if whole else wrong[:LINES]:
        mark = "" if row.passes else "  FAIL"
        print(f"  {row.name:<52} {row.words}{mark}")
    if unknown:
        more = " and more" if len(unknown) > 5 else ""
        print(f"  not in the vectors: {', '.join(unknown[:5])}{more}")


def read_both(vectors: Path, theirs: Path, stage: str) -> tuple[list[Row], list]:
    """(the rows that are compared, names that the vectors do not have) of two files."""
    expected, _ = load(vectors)
    actual, _ = load(theirs)
    if not any(name.startswith(GIVEN) for name in expected):
        raise CheckError(f"{vectors} is no file of docs/vectors; give VECTORS before THEIRS")
    rows = compare(expected, actual, stage)
    if not rows:
        raise CheckError(f"{vectors} asks {theirs} for nothing up to the stage {stage}")
    return rows, sorted(actual.keys() - expected.keys() - wanted(expected, "").keys())


def flags_of(vectors: Path, first: Row) -> list:
    """Known mistakes that make this tensor the first wrong one, with this error.

    The .json beside a case has them: {tensor: {flag: error}}, null if it cannot be compared.
    """
    about = vectors.with_suffix(".json")
    try:
        described = json.loads(about.read_bytes()) if about.is_file() else {}
        flags = described.get("flags", {}).get(first.name, {})
        return [flag for flag, error in flags.items() if is_near(first.error, error)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckError(f"{about} is damaged ({error}); restore it") from None


def is_near(error: float, known: float | None) -> bool:
    """Whether an error is that of a known mistake, which has three digits."""
    return np.isinf(error) if known is None else bool(abs(error - known) <= 0.01 * known)


def told(path: Path, first: Row) -> dict:
    """What --json says of the tensor to begin with."""
    error = first.error if np.isfinite(first.error) else None
    return {"file": path.name, "tensor": first.name, "error": error, "hint": hint_of(first)}


def check_one(vectors: Path, theirs: Path, stage: str) -> dict:
    """Compare a file with another; returns the verdict up to the stage."""
    rows, unknown = read_both(vectors, theirs, stage)
    report(f"{vectors.parent.name} {vectors.stem}", rows, unknown, whole=not stage)
    first = first_wrong(rows)
    return {"agrees": not first, "begin_with": told(vectors, first) if first else None}


def names_in(vectors: Path, theirs: Path) -> tuple[list, list]:
    """The names of all files of vectors, and of those that are in both folders."""
    names = sorted(path.name for path in vectors.glob("*.safetensors"))
    if not names:
        raise CheckError(
            f"{vectors} has no vectors; give a paper's folder, such as docs/vectors/compressive"
        )
    in_both = [name for name in names if (theirs / name).is_file()]
    if not in_both:
        raise CheckError(f"{theirs} has none of the files of {vectors}: {', '.join(names[:3])} ...")
    return names, in_both


def check_folder(vectors: Path, theirs: Path, stage: str, strict: bool) -> dict:
    """Compare the files of one name in two folders; returns the verdict up to the stage.

    If strict, a case that is missing does not agree.
    """
    names, in_both = names_in(vectors, theirs)
    failed = []  # (place, file, first wrong tensor)
    stages = [*STAGES]
    last = 0  # stage that is compared
    for name in in_both:
        path = vectors / name
        rows, unknown = read_both(path, theirs / name, stage)
        last = max(last, *(stages.index(stage_of(row.name)) for row in rows))
        first = first_wrong(rows)
        if first:
            inside = sum(row.name.startswith(INNER) for row in rows)
            failed.append((place_of(first, inside), path, first))
            count = sum(not row.passes for row in rows)
            if len(failed) <= LINES:
                print(f"{path.stem}: {count} of {len(rows)} tensors fail, first {first.name}")
        if unknown and len(failed) <= LINES:
            print(f"{path.stem}: not in the vectors: {', '.join(unknown[:5])}")
    absent = len(names) - len(in_both)
    print(
        f"{len(in_both) - len(failed)} of {len(in_both)} cases agree; {absent} are not in {theirs}"
    )
    verdict = {"agrees": not (failed or (strict and absent)), "version": VERSION}
    verdict |= {"cases": len(in_both), "missing": absent, "level": stages[last]}
    if failed:
        _, path, first = min(failed)
        begin_with(path, first)
        return verdict | {"begin_with": told(path, first)}
    print(f"all agree: vectors {VERSION}, {vectors.name}, level {stages[last]}")
    return verdict | {"begin_with": None}


def place_of(first: Row, inside: int) -> tuple:
    """What sorts files by the computation of their first wrong tensor; missing ones come last.

    Of several in one segment, the file with most values inside a layer says most.
    """
    stage = [*STAGES].index(stage_of(first.name))
    number = segment_of(first.name)
    backwards = stage_of(first.name) == "gradients"  # which begin with the last segment
    return first.is_missing, stage, -number if backwards else number, -inside


def segment_of(name: str) -> int:
    """The number of a tensor's segment, 0 if its name has none."""
    segment = name.partition("/")[0]
    return int(segment) if segment.isdigit() else 0


def begin_with(path: Path, first: Row) -> None:
    """Print the stage that is not done, and what to look at in this file."""
    now = stage_of(first.name)
    print(f"stage {[*STAGES].index(now) + 1} of {len(STAGES)}, {now}, is not done")
    print(f"begin with {path.name}, {first.name}: {first.words}")
    print(f"look at: {hint_of(first)}")
    for flag in flags_of(path, first)[:3]:
        print(f"a known mistake that begins there: {flag} (docs/mistakes.md)")


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
    except OSError as error:
        if error.filename is None:  # the output: nothing more is written there
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # as in: python -m reference.check ... | head
            return 1
        what = error.filename or "the output"
        print(f"{name}: cannot use {what}: {error.strerror}; give another", file=sys.stderr)
        return 2


def main(argv: list | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = "Compare what a port wrote with docs/vectors, tensor by tensor (docs/porting.md)."
    vectors = "a file of docs/vectors, or a folder of them"
    theirs = "what the port wrote: a file, or a folder of files so named"
    stage = "compare what is computed up to this stage of work, in at most 20 lines"
    parser = argparse.ArgumentParser(prog="python -m reference.check", description=words)
    parser.add_argument("vectors", metavar="VECTORS", type=Path, help=vectors)
    parser.add_argument("theirs", metavar="THEIRS", type=Path, help=theirs)
    parser.add_argument("--stage", choices=STAGES, default="", help=stage)
    strict = "fail if a case of VECTORS is not in THEIRS"
    parser.add_argument("--strict", action="store_true", help=strict)
    machine = "print the verdict as one JSON object, the text on standard error"
    parser.add_argument("--json", action="store_true", help=machine)
    options: Any = parser.parse_args(argv)
    both = (options.vectors, options.theirs, options.stage)

    def work() -> bool:
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            if options.vectors.is_dir():
                verdict = check_folder(*both, options.strict)
            else:
                verdict = check_one(*both)
        if options.json:
            print(json.dumps(verdict))
        return verdict["agrees"]

    return exit_code("reference.check", work)


if __name__ == "__main__":
    sys.exit(main())
