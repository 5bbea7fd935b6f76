"""What each reference's parameters begin with, and which configs it refuses: a row a case."""

import collections
import dataclasses
import math
import re

import numpy as np
import pytest

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


REFUSED = {  # {paper: [(changes, part of the message)]}
    "block_recurrent": [
        ({"gate": "gru"}, "gate is 'gru'"),
        ({"configuration": "triple"}, "configuration is 'triple'"),
        ({"buckets": 5}, "buckets is 5"),
        ({"segment": 10}, "segment 10 is not a multiple of window 4"),
        ({"recurrent_layers": (4,)}, "recurrent_layers"),
        ({"recurrent_layers": (0,)}, "recurrent_layers"),
        ({"recurrent_layers": (2, 2)}, "each layer once"),
        ({"feedback": True, "recurrent_layers": ()}, "feedback needs a recurrent layer"),
        ({"max_distance": 3}, "max_distance 3 must exceed half of buckets 6"),
    ],
    "compressive": [
        ({"compression": "zip"}, "compression is 'zip'"),
        ({"compression_loss": "l1"}, "compression_loss is 'l1'"),
        ({"positions": "rotary"}, "positions is 'rotary'"),
        ({"segment": 3}, "segment 3 is too short for a compressed row, which needs 4 tokens"),
        (
            {"segment": 10, "compression": "dilated_conv", "authors_code": True},
            "segment 10 is too short for a compressed row, which needs 11 tokens",
        ),
        (
            {"segment": 30, "compression": "dilated_conv", "compression_loss": "auto_encoding"}
            | {"authors_code": True},
            "no auto_encoding of dilated_conv",
        ),
        (
            {"segment": 30, "compression": "dilated_conv", "authors_code": True}
            | {"compression_loss": "auto_encoding_norm"},
            "no auto_encoding of dilated_conv",
        ),
        ({"authors_code": True, "positions": "simplified"}, "needs transformer_xl positions"),
        ({"memories": (1, 2)}, r"memories \(1, 2\) must be 3 numbers, one for each layer"),
        ({"memories": (1, 2, 13)}, "at most memory 12"),
        ({"memories": (1, 2, 3, -1, 2, 5)}, "at least 0, at most compressed_memory 5"),
        ({"width": 7}, "width 7 is odd"),
        ({"dilations": (0, 1)}, "dilations"),
        ({"dilations": (1, 1)}, "each rate once"),
        (
            {"cutoffs": (0, 3)},
            r"cutoffs \(0, 3\) must be ascending, above 0 and below vocabulary 11",
        ),
        ({"cutoffs": (5, 5)}, "ascending"),
        ({"cutoffs": (11,)}, "below vocabulary 11"),
        ({"cutoffs": (3, 7)}, "width 6 is less than div_value 4 to the power of 2 tails"),
    ],
    "memformer": [
        ({"positions": "sine"}, "positions is 'sine'"),
        ({"slot_value": "none"}, "slot_value is 'none'"),
        ({"slot_normalization": "l2"}, "slot_normalization is 'l2'"),
        ({"width": 9}, "width 9 is not a multiple of heads 2; the nearest is 8"),
        ({"positions": "transformer_xl", "width": 5, "heads": 1}, "width 5 is odd"),
    ],
    "memorizing": [
        ({"memory_layer": 4}, "memory_layer is 4"),
        ({"buckets": 3}, "buckets is 3"),
        ({"memory": 9}, "retrieved is 10; it must be at most memory, 9"),
        ({"max_distance": 3}, "max_distance 3 must exceed half of buckets 6"),
    ],
    "pretrained_recurrence": [
        ({"pooling": "median"}, "pooling is 'median'"),
        ({"pool": "some"}, "pool is 'some'"),
        ({"overlap": 6}, "overlap is 6"),
        ({"width": 11}, "width 11 is not a multiple of heads 2; the nearest is"),
        ({"segment": 10}, "segment 10 is longer than the position table; max_positions is 9"),
        ({"insertion_layers": (4,)}, r"insertion_layers \(4,\) must lie in 1..3"),
        ({"insertion_layers": (0, 1)}, r"must lie in 1..3"),
        ({"insertion_layers": (2, 1)}, "ascending"),
        ({"insertion_layers": ()}, "at least one"),
        ({"insertion_layers": 2}, "insertion_layers 2 must be a tuple"),
    ],
}


@pytest.mark.parametrize("paper", REFUSED)
def test_impossible_configs_are_refused(paper):
    for changes, words in REFUSED[paper]:
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(PAPERS[paper].small, **changes)
            pytest.fail(f"{changes} is taken")
