"""python -m reference.check VECTORS THEIRS: is a port right? Compares with docs/vectors by tensor.

VECTORS is a file of docs/vectors, or a folder of them. THEIRS is a safetensors file with tensors of
the same names, or a folder with files of the same names. Everything that does not begin with
`given/` is compared; values inside a layer, `inner/`, may be left out. A file's table has all
tensors, a folder's those that fail. Exit code 0 if all agree, 1 if not, 2 if a file cannot be read.
It needs NumPy, and nothing else of this project. docs/porting.md tells how to use it.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
# Of the largest magnitude in a tensor; how they were measured stands in docs/porting.md
TOLERANCES = {"float64": 1e-9, "float32": 1e-3}
GIVEN = "given/"
INNER = "inner/"
KINDS = ("logits", "auxiliary", "loss", "next")  # of a segment's values, in their order
GROUPS = ("grad", "grad_state", "sgd", "adamw")  # of what a rollout's gradients give
# What begins the names of parameters, in the order in which a backward pass comes to them
BACKWARDS = (
    "final_norm",
    "decoder.norm",
    "decoder",
    "layers",
    "writer",
    "encoder.norm",
    "encoder",
    "module",
    "positions",
    "initial_memory",
    "embedding",
)


class Row(NamedTuple):
    """The comparison of one tensor."""

    name: str
    error: float  # relative to the largest expected magnitude; infinite if it cannot be compared
    tolerance: float
    words: str

    @property
    def passes(self) -> bool:
        """Whether it agrees; NaN does not."""
        return self.error <= self.tolerance


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckError(
            f"{path} is no safetensors file that NumPy can hold ({type(error).__name__}: {error})"
        ) from None
    return arrays, metadata


def in_order(names: list, inner: list) -> list:
    """Names in the order of computation: inside a layer, by segment, objective, gradients, steps.

    Gradients are in the order of a backward pass, from the last layer to the first.
    """
    return sorted(names, key=lambda name: place_of(name, inner))


def place_of(name: str, inner: list) -> tuple:
    """What a name is sorted by; names of the same kind, by the first number, have alike tuples."""
    head, _, rest = name.partition("/")
    if name in inner:
        return (0, inner.index(name))
    if head.isdigit():
        kind = rest.split(".")[0]
        return (1, int(head), KINDS.index(kind), rest)
    if name == "objective":
        return (2, 0)
    parts = [number for number, prefix in enumerate(BACKWARDS) if rest.startswith(prefix)]
    part = parts[0] if parts else len(BACKWARDS)
    last_layer_first = [-int(word) for word in rest.split(".") if word.isdigit()]
    return (3, GROUPS.index(head), part, last_layer_first, rest)


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
    return Row(name, error, tolerance, words)


def tolerance_of(dtype: np.dtype) -> float:
    """The largest relative error of a type; integers and booleans must be equal."""
    if dtype.kind in "iub":
        return 0.0
    return TOLERANCES.get(str(dtype), TOLERANCES["float32"])


def share_of(tolerance: float, error: float) -> str:
    """How much of the tolerance an error is, in words."""
    if tolerance == 0:
        return "must be equal" if error else "equal"
    share = error / tolerance
    return f"{share:.1%} of the tolerance" if share < 10 else f"{share:.0e} times the tolerance"


def compare(expected: dict, actual: dict, inner: list) -> list[Row]:
    """A Row for each tensor that a port computes, in the order of computation."""
    computed = [name for name in expected if not name.startswith(GIVEN)]
    rows = []
    for name in in_order(computed, inner):
        must_be_there = not name.startswith(INNER) and expected[name].size
        if name in actual:
            rows.append(compared(name, expected[name], actual[name]))
        elif must_be_there:
            rows.append(Row(name, np.inf, 0.0, f"missing, shape {expected[name].shape}"))
    return rows


def report(title: str, rows: list[Row], unknown: list, whole: bool) -> str:
    """Print the verdict, the first wrong tensor, and a table, whole or of failures only.

    Returns the name of the first wrong tensor, or "" if all agree.
    """
    wrong = [row for row in rows if not row.passes]
    missing = [row for row in wrong if row.words.startswith("missing")]
    there = [row for row in wrong if row not in missing]
    print(f"{title}: {len(rows) - len(wrong)} of {len(rows)} tensors agree, {len(missing)} missing")

    first = ""
    if wrong:
        row = there[0] if there else missing[0]
        first = row.name
        is_what = "wrong" if there else "missing"
        print(f"  begin with {first}, the first that is {is_what}: {row.words}")
        if all(row.name.startswith(INNER) for row in wrong):
            print(f"  only {INNER} values are wrong: all that is asked for agrees")
        if all(row.name.startswith("adamw/") for row in wrong):
            print(
                "  only adamw/ is wrong: gradients are right; see AdamW's line in docs/porting.md"
            )

    for row in rows if whole else wrong:
        mark = "" if row.passes else "  FAIL"
        print(f"  {row.name:<52} {row.words}{mark}")
    if unknown:
        more = " and more" if len(unknown) > 5 else ""
        print(f"  not in the vectors: {', '.join(unknown[:5])}{more}")
    return first


def check(vectors: Path, theirs: Path, whole: bool) -> str:
    """Compare one file with another and report; the name of the first wrong tensor, or ""."""
    expected, metadata = load(vectors)
    actual, _ = load(theirs)
    if "paper" not in metadata:
        raise CheckError(
            f"{vectors} is no file of docs/vectors: it has no metadata; give VECTORS before THEIRS"
        )
    rows = compare(expected, actual, json.loads(metadata["inner"]))
    unknown = sorted(actual.keys() - expected.keys())
    return report(f"{metadata['paper']} {metadata['case']}", rows, unknown, whole)


def check_all(vectors: Path, theirs: Path) -> bool:
    """Compare a file with another, or the files of one name in two folders.

    Returns whether all tensors agree.
    """
    if not vectors.is_dir():
        return not check(vectors, theirs, whole=True)
    paths = sorted(vectors.glob("*.safetensors"))
    if not paths:
        raise CheckError(
            f"{vectors} has no vectors; give a paper's folder, such as docs/vectors/compressive"
        )
    in_both = [path for path in paths if (theirs / path.name).is_file()]
    if not in_both:
        names = ", ".join(path.name for path in paths[:3])
        raise CheckError(f"{theirs} has none of the files of {vectors}: {names} ...")

    failed = {}  # {name of the file: its first wrong tensor}
    for path in in_both:
        first = check(path, theirs / path.name, whole=False)
        if first:
            failed[path.name] = first
    agree = f"{len(in_both) - len(failed)} of {len(in_both)} cases agree"
    print(f"{agree}; {len(paths) - len(in_both)} are not in {theirs}")
    if failed:
        name = earliest_failure(paths, failed)
        print(f"begin with {name}, {failed[name]}")
    return not failed


def earliest_failure(paths: list[Path], failed: dict) -> str:
    """The file whose first wrong tensor is the earliest in a layer."""
    inner = [json.loads(load(path)[1]["inner"]) for path in paths]
    order = max(inner, key=len)  # of the file that has the most of these values

    def place(name: str) -> int:
        return order.index(failed[name]) if failed[name] in order else len(order)

    return min(failed, key=place)


def exit_code(name: str, work: Callable[[], bool]) -> int:
    """0 if work() is true, and 1 if not.

    It is 2, with one line, if a file cannot be read; 1 if nobody reads the output any more.
    """
    try:
        right = work()
        sys.stdout.flush()
        return 0 if right else 1
    except CheckError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in: python -m reference.check ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main(argv: list | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = "Compare what a port wrote with docs/vectors, tensor by tensor (docs/porting.md)."
    vectors = "a file of docs/vectors, or a folder of them"
    theirs = "what the port wrote: a file, or a folder of files so named"
    parser = argparse.ArgumentParser(prog="python -m reference.check", description=words)
    parser.add_argument("vectors", metavar="VECTORS", type=Path, help=vectors)
    parser.add_argument("theirs", metavar="THEIRS", type=Path, help=theirs)
    options = parser.parse_args(argv)
    return exit_code("reference.check", lambda: check_all(options.vectors, options.theirs))


if __name__ == "__main__":
    sys.exit(main())
