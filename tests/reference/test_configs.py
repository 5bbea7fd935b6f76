"""What each reference's parameters begin with, and which configs it refuses: a row a case."""

import collections
import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest

from accelerated.data.config import TaskConfig
from accelerated.data.recall import RecallConfig
from reference.gradients import fields_of
from tests.helpers.variants import PAPERS


def listed(name):
    """[(head, rows)] of the parts of a text of this folder."""
    text = Path(__file__).with_name(name).read_text("utf-8")
    parts = [part.splitlines() for part in text.split("== ")[1:]]
    return [(head, [row for row in rows if row[0] != "#"]) for head, *rows in parts]


def deviation_of(name, rows, kind):
    """The deviation of the first row of a kind whose pattern the last parts of a name match."""
    for row in rows:
        of, deviation, pattern = row.split(" ")
        if of == kind and re.search(rf"(^|\.)({pattern})$", name):
            return float(deviation)
    return None


STARTS = dict(listed("starts.txt"))


@pytest.mark.parametrize("paper, case", [(case.split()[0], case) for case in STARTS])
def test_starting_values(paper, case):
    """Within three standard errors of the deviation; cut at 2 / 0.88 of it. Norms begin at one."""
    _, brace, changes = case.partition("{")
    config = dataclasses.replace(PAPERS[paper].small, **fields_of(brace + changes))
    params = PAPERS[paper].reference.init_params(config, np.random.default_rng(0))
    values = collections.defaultdict(list)  # of all layers
    for name, value in params.items():
        values[re.sub(r"layers\.\d+", "layers", name), value.shape].append(value)
    for (name, shape), of_layers in values.items():
        value = np.stack(of_layers)
        if name.endswith("scale"):
            start = 1 if "norm" in name else config.attention_scale
            assert (value == start).all(), f"{name} does not start at {start}"
            continue
        is_matrix = len(shape) > 1 and not name.endswith("_bias")
        deviation = deviation_of(name, STARTS[case], "whole")
        if deviation is None:
            by_fan_in = shape[-1] ** -0.5 if is_matrix else 0
            deviation = deviation_of(name, STARTS[case], "cut") or by_fan_in
            largest = np.abs(value).max()
            assert largest <= 2.3 * deviation, f"{name} is not cut off, or not zero"
        error = 3 / math.sqrt(2 * value.size)
        message = f"{name} has deviation {value.std():.4g}, expected {deviation:.4g}"
        assert value.std() == pytest.approx(deviation, rel=error), message
        mean = value.mean()
        limit = 5 * deviation / math.sqrt(value.size)
        assert abs(mean) <= limit, f"{name} has a mean of {mean:.4g}, expected 0"
        for axis, size in enumerate(value.shape if deviation else ()):
            sums = np.moveaxis(value, axis, 0).reshape(size, -1).sum(1)
            said = f"{name} has numbers that were drawn once for several places along axis {axis}"
            assert len({*sums}) == size, said


MAY_BE_0 = ("memory", "compressed_memory", "encoder_layers", "vectors", "module_layers", "overlap")


@pytest.mark.parametrize("paper", PAPERS)
def test_numbers_that_are_too_small_are_refused(paper):
    """A row for each size; the message names it with its value."""
    small = PAPERS[paper].small
    refused = {"dropout": [-0.1, 1.0]}
    if hasattr(small, "attention_scale"):
        refused["attention_scale"] = [0.0, math.inf, math.nan]
    for field in dataclasses.fields(small):
        if field.type in (int, "int"):
            refused[field.name] = [-1 if field.name in MAY_BE_0 else 0]
    for name, values in refused.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"{name} (is )?{value}\b"):
                dataclasses.replace(small, **{name: value})
                pytest.fail(f"{name} {value} is taken")


SMALL = {name: paper.small for name, paper in PAPERS.items()}
SMALL |= {"recall": RecallConfig(), "tasks": TaskConfig()}
REFUSED = []  # [(name, changes in JSON, a part of the message)]
for refusing, refusals in listed("refused.txt"):
    REFUSED += [(refusing, *row.split(" => ")) for row in refusals]


@pytest.mark.parametrize("name, changes, words", REFUSED)
def test_impossible_configs_are_refused(name, changes, words):
    """Each is a row of refused.txt."""
    with pytest.raises(ValueError, match=re.escape(words)):
        dataclasses.replace(SMALL[name], **fields_of(changes))
        pytest.fail(f"{changes} is taken")
