"""python -m reference.check VECTORS THEIRS: is a port right? Compares what it wrote with docs/vectors, tensor by tensor.

VECTORS is a file of docs/vectors, or a folder of them; THEIRS is a safetensors file with tensors of the same names, or a folder
with files of the same names. Everything that does not begin with `given/` is compared; values inside a layer, `inner/`, may be
left out. A file's table has all tensors, a folder's those that fail. Exit code 0 if all agree, 1 if not, 2 if a file cannot be
read. It needs NumPy, and nothing else of this project. docs/porting.md tells how to use it.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "BOOL": "?",
}  # of safetensors, as NumPy has them
TOLERANCES = {
    "float64": 1e-9,
    "float32": 1e-3,
}  # of the largest magnitude in a tensor; measured: docs/porting.md
GIVEN, INNER = "given/", "inner/"
BACKWARDS = (
    "final_norm",
    "decoder.norm",
    "decoder",
    "layers",
    "writer",
)  # parameters, as a backward pass comes to them
BACKWARDS += ("encoder.norm", "encoder", "module", "positions", "initial_memory", "embedding")


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
    """({name: array}, {key: text of the metadata}) of a safetensors file: a header's length, the header in JSON, the arrays."""
    if not Path(path).is_file():
        raise CheckError(f"{path}: no such file")
    try:
        content, arrays = Path(path).read_bytes(), {}
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        metadata = header.pop("__metadata__", {})
        for name, about in header.items():
            first, last = about["data_offsets"]
            array = np.frombuffer(
                bytearray(content[begin + first : begin + last]), TYPES[about["dtype"]]
            )  # may be changed
            arrays[name] = array.reshape(about["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckError(
            f"{path} is no safetensors file that NumPy can hold ({type(error).__name__}: {error})"
        ) from None
    return arrays, metadata


def in_order(names: list, inner: list) -> list:
    """Names in the order of computation: inside a layer, by segment, gradients from the last layer to the first, steps."""
    kinds, groups = ("logits", "auxiliary", "loss", "next"), ("grad", "grad_state", "sgd", "adamw")

    def place(name):
        head, _, rest = name.partition("/")
        if name in inner:
            return (0, inner.index(name))
        if head.isdigit():
            return (1, int(head), kinds.index(rest.split(".")[0]), rest)
        if name == "objective":
            return (2, 0)
        part = next(
            (number for number, prefix in enumerate(BACKWARDS) if rest.startswith(prefix)),
            len(BACKWARDS),
        )
        return (
            3,
            groups.index(head),
            part,
            [-int(word) for word in rest.split(".") if word.isdigit()],
            rest,
        )

    return sorted(names, key=place)


def compared(name: str, expected: np.ndarray, actual: np.ndarray) -> Row:
    """The Row of a tensor that both have; integers and booleans must be equal."""
    tolerance = TOLERANCES.get(
        str(actual.dtype), 0.0 if actual.dtype.kind in "iub" else TOLERANCES["float32"]
    )
    if expected.shape != actual.shape:
        return Row(name, np.inf, tolerance, f"shape {actual.shape}, expected {expected.shape}")
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    if not np.isfinite(actual).all():
        return Row(
            name,
            np.inf,
            tolerance,
            f"{np.count_nonzero(~np.isfinite(actual))} of {actual.size} NaN or infinite",
        )
    if expected.size == 0:
        return Row(name, 0.0, tolerance, "of size zero")
    difference, scale = np.abs(actual - expected), np.abs(expected).max()
    error = float(difference.max() / (scale or 1.0))  # of what is exactly zero, the error itself
    where = ",".join(str(int(i)) for i in np.unravel_index(difference.argmax(), difference.shape))
    if not tolerance:
        share = "must be equal" if error else "equal"
    else:
        share = f"{error / tolerance:.1%} of the tolerance"
        share = share if error / tolerance < 10 else f"{error / tolerance:.0e} times the tolerance"
    return Row(
        name,
        error,
        tolerance,
        f"{error:.1e} at [{where}], {share}{'' if scale else ', expected exactly zero'}",
    )


def compare(expected: dict, actual: dict, inner: list) -> list[Row]:
    """A Row for each tensor that a port computes, in the order of computation."""
    rows = []
    for name in in_order([name for name in expected if not name.startswith(GIVEN)], inner):
        if name in actual:
            rows.append(compared(name, expected[name], actual[name]))
        elif not name.startswith(INNER) and expected[name].size:
            rows.append(Row(name, np.inf, 0.0, f"missing, shape {expected[name].shape}"))
    return rows


def report(title: str, rows: list[Row], unknown: list, whole: bool) -> str:
    """Print the verdict, the first wrong tensor, and a table, whole or of failures only; returns that tensor's name, if any."""
    first, wrong = None, [row for row in rows if not row.passes]
    missing = [row for row in wrong if row.words.startswith("missing")]
    print(f"{title}: {len(rows) - len(wrong)} of {len(rows)} tensors agree, {len(missing)} missing")
    if wrong:
        first = next((row for row in wrong if row not in missing), wrong[0])
        print(
            f"  begin with {first.name}, the first that is {'missing' if first in missing else 'wrong'}: {first.words}"
        )
    if wrong and all(row.name.startswith(INNER) for row in wrong):
        print(f"  only {INNER} values are wrong: all that is asked for agrees")
    if wrong and all(row.name.startswith("adamw/") for row in wrong):
        print("  only adamw/ is wrong: gradients are right; see AdamW's line in docs/porting.md")
    for row in rows if whole else wrong:
        print(f"  {row.name:<52} {row.words}{'' if row.passes else '  FAIL'}")
    if unknown:
        print(
            f"  not in the vectors: {', '.join(unknown[:5])}{' and more' if len(unknown) > 5 else ''}"
        )
    return first.name if first else ""


def check(vectors: Path, theirs: Path, whole: bool) -> str:
    """Compare one file with another and report; returns the name of the first wrong tensor, if any."""
    (expected, metadata), (actual, _) = load(vectors), load(theirs)
    if "paper" not in metadata:
        raise CheckError(
            f"{vectors} is no file of docs/vectors: it has no metadata; give VECTORS before THEIRS"
        )
    rows = compare(expected, actual, json.loads(metadata["inner"]))
    return report(
        f"{metadata['paper']} {metadata['case']}",
        rows,
        sorted(actual.keys() - expected.keys()),
        whole,
    )


def check_all(vectors: Path, theirs: Path) -> bool:
    """Compare a file with another, or the files of one name in two folders; returns whether all tensors agree."""
    if not vectors.is_dir():
        return not check(vectors, theirs, whole=True)
    paths = sorted(vectors.glob("*.safetensors"))
    if not paths:
        raise CheckError(
            f"{vectors} has no vectors; give a paper's folder, such as docs/vectors/compressive"
        )
    wrong = {
        path.name: check(path, theirs / path.name, whole=False)
        for path in paths
        if (theirs / path.name).is_file()
    }
    if not wrong:
        raise CheckError(
            f"{theirs} has none of the files of {vectors}: {', '.join(path.name for path in paths[:3])} ..."
        )
    failed = {name: tensor for name, tensor in wrong.items() if tensor}
    print(
        f"{len(wrong) - len(failed)} of {len(wrong)} cases agree; {len(paths) - len(wrong)} are not in {theirs}"
    )
    if failed:  # the earliest in a layer that has the most of these values
        order = max((json.loads(load(path)[1]["inner"]) for path in paths), key=len)
        name = min(
            failed,
            key=lambda name: order.index(failed[name]) if failed[name] in order else len(order),
        )
        print(f"begin with {name}, {failed[name]}")
    return not failed


def exit_code(name: str, work: Callable[[], bool]) -> int:
    """0 if work() is true, 1 if not or if nobody reads its output any more, 2 with one line if a file cannot be read."""
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
    parser = argparse.ArgumentParser(prog="python -m reference.check", description=words)
    parser.add_argument(
        "vectors", metavar="VECTORS", type=Path, help="a file of docs/vectors, or a folder of them"
    )
    parser.add_argument(
        "theirs",
        metavar="THEIRS",
        type=Path,
        help="what the port wrote: a file, or a folder of files so named",
    )
    options = parser.parse_args(argv)
    return exit_code("reference.check", lambda: check_all(options.vectors, options.theirs))


if __name__ == "__main__":
    sys.exit(main())
