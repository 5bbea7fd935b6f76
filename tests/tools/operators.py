"""The operators of docs/vectors/operators: functions of a reference by themselves, both ways.

tests/tools/vectors.py writes them. operators.txt lists functions below a paper and a case that
calls them. "name: gradients" is name_forward and name_backward, whose gradients of parameters have
names of their own; "name: =result" is a function without gradients. What it is given has the
shapes of its first call, or of the last if the name ends with [-1], and random numbers.
"""

import inspect
import sys
import zlib
from pathlib import Path

import numpy as np

from reference import vectors
from reference.gradients import function_of, leaves, modules_of, random_like, rebuilt
from reference.rollout import rollout_forward
from tests.tools import inner

LISTED = Path(__file__).with_name("operators.txt")
NOT_WRITTEN = ("config", "rng", "rate", "epsilon", "in_values", "name", "heads")
PARAMS = ("p", "params")
LANES = 2  # of the case's, to be small
LARGE = {"softmax": "scores", "cross_entropy": "logits"}  # the largest is taken off first


def listed(paper):
    """{case: {function: names of its gradients, or "=" and its result}} of a paper."""
    found = {}
    for line in LISTED.read_text().splitlines():
        if not line.startswith(" "):
            of, case = line.split()
        elif of == paper:
            function, _, names = line.strip().partition(":")
            found.setdefault(case, {})[function] = names.strip().split(", ")
    return found


def calls_of(case, functions):
    """{function: the arguments of its first or last call} while a case is read."""
    reference, config, params, state, segments = case
    files = {module.__file__ for module in modules_of(reference)}
    found = {}

    def notice(frame, event, result):
        name = frame.f_code.co_name.removesuffix("_forward")
        if event == "call" and frame.f_code.co_filename in files:
            if name in functions:
                found.setdefault(name, dict(frame.f_locals))
            if f"{name}[-1]" in functions:
                found[f"{name}[-1]"] = dict(frame.f_locals)

    sys.setprofile(notice)
    try:
        rollout_forward(reference, params, config, segments, state)
    finally:
        sys.setprofile(None)
    return found


def of_few_lanes(value):
    """A value without the lanes after the first ones."""
    if isinstance(value, dict):
        return {name: of_few_lanes(part) for name, part in value.items()}
    has_lanes = isinstance(value, np.ndarray) and value.shape[:1] == (vectors.LANES,)
    return value[:LANES] if has_lanes else value


def random_in_its_place(value, rng):
    """A value with random numbers of few digits in the place of its arrays of fractions."""
    drawn = random_like(value, rng)
    return rebuilt(drawn, (vectors.on_grid(array) for _, array in leaves(drawn)))


def what_counts(reference, function, given):
    """False where a result is of no key that is seen, and is written as 0."""
    if function == "relative_shift":
        return reference.causal_mask(*given["by_distance"].shape[-2:])
    return np.array(True)


def operator(reference, function, given, names):
    """({name: what it is given}, {name: what it computes}) of a function."""
    rng = np.random.default_rng(zlib.crc32(function.encode()))
    few = {name: value if name in PARAMS else of_few_lanes(value) for name, value in given.items()}
    given = random_in_its_place(few, rng)
    if function in LARGE:
        given[LARGE[function]][0] += 1e4  # in one lane
    if names[0].startswith("="):
        return given, {names[0][1:]: function_of(reference, function)(**given)}

    read = {}  # the parameters that it reads
    with inner.noting(reference, read.setdefault) as noted:
        params = {key: noted(value) for key, value in given.items() if key in PARAMS}
        *outs, cache = function_of(reference, f"{function}_forward")(**(given | params))
    for key, value in params.items():
        given[key] = {name: value[name] for name in read}

    counts = what_counts(reference, function, given)
    backward = function_of(reference, f"{function}_backward")
    arriving = {}  # {argument of backward: gradient of a result}
    arguments = []
    for argument in inspect.signature(backward).parameters:
        if argument == "config":
            arguments.append(given["config"])
        elif argument.startswith("d"):
            out = np.asarray(outs[len(arriving)])
            arriving[argument] = random_in_its_place(out, rng) * counts
            arguments.append(arriving[argument])
        else:
            arguments.append(cache)
    computed = {name[1:]: out * counts for name, out in zip(arriving, outs, strict=False)}

    returned = backward(*arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    computed |= dict(zip([*filter(None, names), "dparams"], returned, strict=False))
    return given | arriving, computed


def flat(rows):
    """(name, array) of what is written: numbers, arrays, and those of dicts."""
    for name, value in rows.items():
        if isinstance(value, dict):
            prefix = "param" if name in PARAMS else name.replace("dparams", "dparam")
            yield from ((f"{prefix}.{key}", part) for key, part in value.items())
        elif value is not None and name not in NOT_WRITTEN:
            yield name, np.asarray(value)


def operators(paper, case_of):
    """{name: array} of a paper's operators; case_of(name) is a Case."""
    given_rows = {}
    rows = {}
    for name, functions in listed(paper).items():
        case = case_of(name)
        calls = calls_of(case, functions)
        for call, names in functions.items():
            function = call.removesuffix("[-1]")
            given, computed = operator(case.reference, function, calls[call], names)
            if function == "slot_attention":  # its mask is one of tokens, and is written as that
                names = {"mask": "readable"}
                given = {names.get(key, key): value for key, value in given.items()}
                given["readable"] = given["readable"][:, 0, 0]
            given_rows |= {f"given/operator/{function}/{key}": row for key, row in flat(given)}
            rows |= {f"operator/{function}/{key}": row for key, row in flat(computed)}
    return given_rows | rows
