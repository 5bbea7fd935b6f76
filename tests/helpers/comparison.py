"""One table for every comparison: a row per tensor; NaN, a missing or extra row, or a row over tolerance is a failure."""

import numpy as np

from accelerated.lab.speed.agreement import TOLERANCE

__all__ = ["LADDER", "TOLERANCE"]  # TOLERANCE: of fast paths and devices against plain paths on the CPU

LADDER = 1e-9  # accelerated models against references in float64; the worst error measured is 1.1e-12


def as_array(value):
    return value.detach().double().cpu().numpy() if hasattr(value, "detach") else np.asarray(value, dtype=np.float64)


def relative_error(expected, actual):
    """The largest difference divided by the largest expected magnitude of the whole tensor."""
    if expected.size == 0:
        return 0.0
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def measured(error, tolerance):
    """Called with the error of every tensor that is compared; tests/tools/trust.py gathers them."""


def row(name, expected, actual, tolerance):
    """Return (line of the table, whether it passes)."""
    expected, actual = as_array(expected), as_array(actual)
    if expected.shape != actual.shape:
        return f"{name:<44} shape {actual.shape}, expected {expected.shape}  FAIL", False
    if not (np.isfinite(expected).all() and np.isfinite(actual).all()):
        return f"{name:<44} not finite  FAIL", False
    if not expected.any():  # no relative error possible: zero must be exactly zero
        passes = not actual.any()
        return f"{name:<44} exactly zero {'' if passes else ' FAIL'}", passes
    error = relative_error(expected, actual)
    measured(error, tolerance)
    where = np.unravel_index(np.abs(actual - expected).argmax(), expected.shape) if expected.size else ()
    passes = error <= tolerance
    at = ",".join(map(str, map(int, where)))
    return f"{name:<44} {error:.1e} at [{at}], {error / tolerance:.1%} of tolerance{'' if passes else '  FAIL'}", passes


def assert_agree(expected, actual, tolerance, title=""):
    """Compare two {name: array or tensor}; print the table, and fail unless all rows are present and within tolerance."""
    assert expected, f"{title}: nothing was compared"
    lines, passed = [], True
    for name in sorted(expected.keys() | actual.keys()):
        if name not in expected or name not in actual:
            lines.append(f"{name:<44} only in {'actual' if name in actual else 'expected'}  FAIL")
            passed = False
            continue
        line, passes = row(name, expected[name], actual[name], tolerance)
        lines.append(line)
        passed = passed and passes
    print("\n".join([title, *lines]))
    assert passed, "\n".join([title, *(line for line in lines if line.endswith("FAIL"))])


def named(prefix, state, between="."):
    """A state's fields as {name: tensor}."""
    return {f"{prefix}{between}{name}": field for name, field in zip(state._fields, state, strict=True)}
