"""Writes docs/vectors from the references, for those who port a method (docs/porting.md).

    python -m tests.tools.vectors

A case is one config, its parameters, a rollout of three segments and all that a port should compute
from them. Its numbers are drawn from its name. What needs no arithmetic is in rules.json, which is
kept by hand: masks, distances, buckets, windows, schedules, a task's documents.
"""

import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np

from reference import vectors
from reference.rollout import rollout_backward, rollout_forward
from tests.helpers.optimizers import ADAMW, SGD_RATE, adamw, sgd
from tests.helpers.variants import PAPERS
from tests.models.memformer import random_task
from tests.tools import inner
from tests.tools.cases import EVERY_CASE, STEPPED, TASKS, VARIANTS, config_of
from tests.tools.operators import operators

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"
CATALOGUE = FOLDER.parent / "ports" / "mistakes.json"
STEPS = 3  # of AdamW


def inputs_of(paper, name):
    """What a port is given in a case."""
    rng = np.random.default_rng(zlib.crc32(f"{paper}/{name}".encode()))
    config = config_of(paper, name)
    tasks = TASKS.get((paper, name), ())

    def task_of(k):
        return random_task(config, rng, tasks[k]) if tasks and tasks[k] else None

    return vectors.random_case(PAPERS[paper].reference, config, rng, task_of)


def steps_of(case):
    """{name: array} of the parameters after a step of gradient descent, and after three of AdamW.

    All steps read the same segments.
    """
    reference, config, params, state, segments = case
    once = {}
    after = params
    moments = {}
    for step in range(1, STEPS + 1):
        _, caches, _ = rollout_forward(reference, after, config, segments, state)
        grads, _ = rollout_backward(reference, after, config, caches)
        once = once or sgd(params, grads)
        after, moments = adamw(after, grads, moments, step)
    rows = {f"sgd/{name}": value for name, value in once.items()}
    return rows | {f"adamw/{name}": value for name, value in after.items()}


def computed(paper, name, reference, steps=True, backwards=True):
    """{name: array} of all that a port should compute, by this reference.

    Steps of optimisers and gradients are left out if not asked for.
    """
    config = reference.Config(**dataclasses.asdict(config_of(paper, name)))
    case = inputs_of(paper, name)._replace(reference=reference, config=config)
    rows = inner.rows_of(case, name, backwards)
    if (paper, name) == ("memformer", "recall"):  # how often replay calls what
        count = len(case.segments)
        rows |= {"replay/advance": np.array(count - 1), "replay/forward": np.array(count)}
    return rows | steps_of(case) if steps and name in STEPPED else rows


def case_file(paper, name):
    """({name: array}, what stands beside them) of a case."""
    case = inputs_of(paper, name)
    rows = vectors.given_of(case) | computed(paper, name, case.reference)
    about = vectors.about(paper, name, case.config)
    about["steps"] = {"sgd": {"rate": SGD_RATE}, "adamw": ADAMW}
    return rows, about | {"flags": flags_of(paper, name)}


def operators_case(paper, name):
    """A case whose functions are called; Memformer's has tasks, whose masks have every lane."""
    case = inputs_of(paper, name)
    if (paper, name) != ("memformer", "continuation"):
        return case
    rng = np.random.default_rng(0)
    continuation = random_task(case.config, rng, (0,) * vectors.LANES)
    return case._replace(segments=[each._replace(task=continuation) for each in case.segments])


def operators_file(paper):
    """({name: array}, what stands beside them) of a paper's operators."""
    rows = operators(paper, lambda name: operators_case(paper, name))
    return rows, vectors.about(paper, "operators", config_of(paper, next(iter(VARIANTS[paper]))))


def flags_of(paper, name):
    """{first wrong tensor: {flag: how wrong}} of the catalogue's mistakes that a case catches."""
    flags = {}
    for mistake in json.loads(CATALOGUE.read_text()):
        if mistake["paper"] == paper and name in mistake["cases"]:
            tensor, mark = mistake["cases"][name]
            flags.setdefault(tensor, {})[mistake["flag"]] = mark
    return flags


def main():
    """Write docs/vectors."""
    for paper, name in EVERY_CASE:
        (FOLDER / paper).mkdir(parents=True, exist_ok=True)
        vectors.write(FOLDER / paper / f"{name}.safetensors", *case_file(paper, name))
    (FOLDER / "operators").mkdir(exist_ok=True)
    for paper in VARIANTS:
        path = FOLDER / "operators" / f"{paper}.safetensors"
        vectors.write(path, *operators_file(paper))


if __name__ == "__main__":
    main()
