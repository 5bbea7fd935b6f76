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

WIDE = {"width": 300, "head_width": 60, "heads": 5, "feed_forward": 400}
GATES = {"gate": "lstm", "configuration": "dual", "states": 60, "buckets": 64, "max_distance": 128}
AUTHORS = (2 / 3**0.5) ** 0.5  # over the root of the fan in, with three layers
# {paper: (changes, {ends of names: deviation of what is cut off}, {..: of what is not})}. Any other
# matrix has 1 / sqrt(fan in) and is cut off, any other parameter is zero
STARTS = {
    "block_recurrent": (
        WIDE | GATES,
        {
            r"attention_gate\.weight_.": (0.1 / 600) ** 0.5,
            r"mlp_gate\.weight_.": (0.1 / 400) ** 0.5,
        },
        {"embedding|ids": 1, "position_bias": 1 / 8, r"initial|\w+_gate\.bias_.": 0.1},
    ),
    "compressive": (
        WIDE | {"compression": "dilated_conv", "compression_loss": "auto_encoding"},
        {r"compression\.weight": 1200**-0.5, r"compression\.dilated_.": 600**-0.5},
        {"embedding": 1, "content_bias|distance_bias": 0.02},
    ),
    "compressive authors": (
        WIDE | {"compression": "dilated_conv", "authors_code": True, "segment": 16},
        {
            "query|key|value|distance_key|compressed_distance_key|mlp_hidden": AUTHORS * 300**-0.5,
            "mlp_output": AUTHORS * 400**-0.5,
            "output": 0.8796 * 300**-0.5,
            r"compression\.weight": 0.8796 * 1200**-0.5,
            r"compression\.dilated_.": 0.8796 * 600**-0.5,
        },
        {"embedding": 1, "(content|distance|compressed_distance)_bias": (2 / (5 + 5 * 60)) ** 0.5},
    ),
    "compressive simplified": (
        WIDE | {"positions": "simplified", "max_distance": 99},
        {r"compression\.weight": 1200**-0.5},
        {"embedding|positions": 1},
    ),
    "compressive adaptive": (
        {"vocabulary": 9000, "width": 256, "cutoffs": (1000, 4000), "div_value": 4},
        {r"compression\.weight": 1024**-0.5},
        {"embedding|clusters": 1, "content_bias|distance_bias": 0.02},
    ),
    "memformer": (
        WIDE | {"max_distance": 50, "segment": 60},
        {},
        {"embedding|initial_memory": 1, "positions": 0.5},
    ),
    "memformer transformer_xl": (
        WIDE | {"positions": "transformer_xl"},
        {},
        {"embedding|initial_memory": 1, "content_bias|distance_bias": 0.02},
    ),
    "memorizing": (
        WIDE | {"vocabulary": 500, "buckets": 64, "max_distance": 128},
        {},
        {"embedding": 1, "position_bias": 1 / 8},
    ),
    "pretrained_recurrence": (
        {"width": 128, "heads": 8, "feed_forward": 512, "layers": 4, "vocabulary": 500}
        | {"max_positions": 300, "module_width": 200, "pooling": "attention"},
        {},
        {"embedding|query|key|value|mlp_hidden": 0.02, "positions": 0.01}
        | {"output|mlp_output": 0.02 / math.sqrt(8)},
    ),
}


def deviation_of(name, deviations):
    """The deviation of the first pattern that the last parts of a name match, or None."""
    for pattern, deviation in deviations.items():
        if re.search(rf"(^|\.)({pattern})$", name):
            return deviation
    return None


@pytest.mark.parametrize("case", STARTS)
def test_starting_values(case):
    """Within three standard errors of the deviation; cut at 2 / 0.88 of it. Norms begin at one."""
    changes, cut_off, whole = STARTS[case]
    paper, *_ = case.split()
    config = dataclasses.replace(PAPERS[paper].small, **changes)
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
        deviation = deviation_of(name, whole)
        if deviation is None:
            by_fan_in = shape[-1] ** -0.5 if is_matrix else 0
            deviation = deviation_of(name, cut_off) or by_fan_in
            largest = np.abs(value).max()
            assert largest <= 2.3 * deviation, f"{name} is not cut off, or not zero"
        error = 3 / math.sqrt(2 * value.size)
        message = f"{name} has deviation {value.std():.4g}, expected {deviation:.4g}"
        assert value.std() == pytest.approx(deviation, rel=error), message


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
LISTED = Path(__file__).with_name("refused.txt").read_text("utf-8")
REFUSED = []  # [(name, changes in JSON, a part of the message)]
for part in LISTED.split("== ")[1:]:
    refusing, *rows = part.splitlines()
    REFUSED += [(refusing, *row.split(" => ")) for row in rows]


@pytest.mark.parametrize("name, changes, words", REFUSED)
def test_impossible_configs_are_refused(name, changes, words):
    """Each is a row of refused.txt."""
    with pytest.raises(ValueError, match=re.escape(words)):
        dataclasses.replace(SMALL[name], **fields_of(changes))
        pytest.fail(f"{changes} is taken")
