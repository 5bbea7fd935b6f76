"""What each reference's parameters begin with, and which configs it refuses: a row a case."""

import dataclasses
import math
import re

import numpy as np
import pytest

from tests.helpers.variants import PAPERS

WIDE = {"width": 300, "head_width": 60, "heads": 5, "feed_forward": 400}
GATES = {"gate": "lstm", "configuration": "dual", "states": 60, "buckets": 64, "max_distance": 128}
GPT2 = {
    "width": 128,
    "heads": 8,
    "feed_forward": 512,
    "layers": 4,
    "vocabulary": 500,
    "max_positions": 300,
    "module_width": 200,
}
# {paper: (changes, {matrix: fan in}, {other parameter: deviation})}; a matrix's is 1 / sqrt(fan in)
STARTS = {
    "block_recurrent": (
        WIDE | GATES,
        {
            "layers.0.key": 300,
            "layers.0.query": 300,
            "layers.0.mlp_output": 400,
            "layers.1.state.cross_query": 300,
        },
        {
            "embedding": 1,
            "layers.0.position_bias": 1 / 8,
            "layers.1.state.ids": 1,
            "layers.1.state.initial": 0.1,
        }
        | {f"layers.1.state.attention_gate.weight_{m}": (0.1 / 600) ** 0.5 for m in "zif"}
        | {f"layers.1.state.mlp_gate.weight_{m}": (0.1 / 400) ** 0.5 for m in "zif"}
        | {
            f"layers.1.state.{gate}.bias_{m}": 0.1
            for gate in ("attention_gate", "mlp_gate")
            for m in "zif"
        },
    ),
    "compressive": (
        WIDE | {"compression": "dilated_conv", "compression_loss": "auto_encoding"},
        {
            f"layers.1.{name}": 300
            for name in ("query", "key", "value", "distance_key", "output", "mlp_hidden")
        }
        | {"layers.1.mlp_output": 400, "layers.1.compression.weight": 1200}
        | {"layers.1.compression.dilated_2": 600, "layers.1.compression.decoder": 300},
        {"embedding": 1, "layers.1.content_bias": 0.02, "layers.1.distance_bias": 0.02},
    ),
    "compressive authors": (
        WIDE | {"compression": "dilated_conv", "authors_code": True, "segment": 16},
        {},
        {
            f"layers.1.{name}": (2 / 3**0.5 / 300) ** 0.5  # variance 2 / sqrt(L) / in, L = 3
            for name in ("query", "value", "distance_key", "compressed_distance_key", "mlp_hidden")
        }
        | {"layers.1.mlp_output": (2 / 3**0.5 / 400) ** 0.5}
        | {"layers.0.output": 0.8796 * 300**-0.5, "layers.2.compression.weight": 0.8796 / 1200**0.5}
        | {
            f"layers.{layer}.{name}": (2 / (5 + 5 * 60)) ** 0.5
            for layer in range(3)
            for name in ("content_bias", "distance_bias", "compressed_distance_bias")
        },
    ),
    "compressive simplified": (
        WIDE | {"positions": "simplified", "max_distance": 99},
        {"layers.2.query": 300},
        {"layers.2.positions": 1},
    ),
    "compressive adaptive": (
        {"vocabulary": 9000, "width": 256, "cutoffs": (1000, 4000), "div_value": 4},
        {"tails.0.projection": 64, "tails.1.projection": 16},
        {"embedding": 1, "clusters": 1, "tails.0.embedding": 1, "tails.1.embedding": 1},
    ),
    "memformer": (
        WIDE | {"max_distance": 50, "segment": 60},
        {
            f"encoder.layers.{name}": 300
            for name in ("1.attention.query", "0.attention.output", "1.read.key")
        }
        | {"writer.query": 300, "writer.value": 300, "decoder.layers.2.cross.value": 300}
        | {"decoder.layers.1.mlp_hidden": 300, "decoder.layers.1.mlp_output": 400},
        {"embedding": 1, "initial_memory": 1, "decoder.layers.0.attention.positions": 0.5},
    ),
    "memorizing": (
        WIDE | {"vocabulary": 500, "buckets": 64, "max_distance": 128},
        {f"layers.2.{name}": 300 for name in ("query", "key", "value", "output", "mlp_hidden")}
        | {"layers.2.mlp_output": 400},
        {"embedding": 1, "layers.0.position_bias": 1 / 8},
    ),
    "pretrained_recurrence": (
        GPT2 | {"pooling": "attention"},
        {"module.hidden_1": 128, "module.hidden_2": 200, "module.inserted": 200},
        {"embedding": 0.02, "positions": 0.01, "layers.0.query": 0.02, "layers.3.mlp_hidden": 0.02}
        | {"layers.1.output": 0.02 / math.sqrt(8), "layers.2.mlp_output": 0.02 / math.sqrt(8)},
    ),
}
ZERO_BIASES = r"(?<!position)(?<!content)(?<!distance)_bias$|norm\.bias$"
ZEROS = ZERO_BIASES + "|memory_gate|layer_scores|fixed_key"


@pytest.mark.parametrize("case", STARTS)
def test_starting_values(case):
    """Within three standard errors of the deviation; cut at 2 / 0.88 of it.

    Norms begin at one, biases and the like at zero.
    """
    changes, matrices, deviations = STARTS[case]
    paper = case.split()[0]
    config = dataclasses.replace(PAPERS[paper].small, **changes)
    params = PAPERS[paper].reference.init_params(config, np.random.default_rng(0))
    for name, fan_in in matrices.items():
        assert params[name].shape[1] == fan_in, f"{name} has another fan in"
    of_matrices = {name: fan_in**-0.5 for name, fan_in in matrices.items()}
    for name, deviation in (of_matrices | deviations).items():
        value = params[name]
        error = 3 / math.sqrt(2 * value.size)
        assert value.std() == pytest.approx(deviation, rel=error), f"{name} has another deviation"
        if name in matrices or "gate.weight" in name:
            assert np.abs(value).max() < 2.3 * deviation, f"{name} is not cut off"
    for name, value in params.items():
        if name.endswith("scale"):
            start = 1 if "norm" in name else config.attention_scale
            assert (value == start).all(), f"{name} does not start at {start}"
        if re.search(ZEROS, name):
            assert not value.any(), f"{name} does not start at zero"


def test_starting_values_that_a_config_chooses():
    init_params = PAPERS["memformer"].reference.init_params
    wide = dataclasses.replace(PAPERS["memformer"].small, **WIDE, positions="transformer_xl")
    params = init_params(wide, np.random.default_rng(0))
    assert params["decoder.layers.0.attention.content_bias"].std() == pytest.approx(0.02, rel=0.15)
    assert "decoder.layers.0.attention.query_bias" not in params
    assert "decoder.layers.0.cross.query_bias" in params


def each(**values):
    """A row for each value that a field may not have; the message says "field is value"."""
    rows = []
    for name, refused in values.items():
        rows += [({name: value}, f"{name} is {value!r}") for value in refused]
    return rows


REFUSED = {  # {paper: [(changes, part of the message)]}
    "block_recurrent": [
        *each(
            vocabulary=[0],
            gate=["gru"],
            configuration=["triple"],
            window=[0],
            buckets=[5],
            states=[0],
            dropout=[1.0, -0.1],
        ),
        *each(attention_scale=[0.0, math.inf, math.nan]),
        ({"segment": 10}, "segment 10 is not a multiple of window 4"),
        ({"recurrent_layers": (4,)}, "recurrent_layers"),
        ({"recurrent_layers": (0,)}, "recurrent_layers"),
        ({"recurrent_layers": (2, 2)}, "each layer once"),
        ({"feedback": True, "recurrent_layers": ()}, "feedback needs a recurrent layer"),
        ({"max_distance": 3}, "max_distance 3 must exceed half of buckets 6"),
    ],
    "compressive": [
        *each(
            compression=["zip"],
            compression_loss=["l1"],
            positions=["rotary"],
            memory=[-1],
            compressed_memory=[-2],
        ),
        *each(
            vocabulary=[0],
            layers=[0],
            compression_rate=[0],
            max_distance=[0],
            div_value=[0],
            dropout=[1.0],
        ),
        ({"segment": 3}, "segment 3 is too short for a compressed row: compression_rate is 4"),
        (
            {"segment": 10, "compression": "dilated_conv", "authors_code": True},
            "segment 10 is too short",
        ),
        (
            {"segment": 30, "compression": "dilated_conv", "compression_loss": "auto_encoding"}
            | {"authors_code": True},
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
        *each(
            vocabulary=[0],
            slots=[0],
            segment=[0],
            decoder_layers=[0],
            encoder_layers=[-1],
            heads=[0],
            max_distance=[0],
        ),
        *each(positions=["sine"], slot_value=["none"], slot_normalization=["l2"], dropout=[1.0]),
        ({"width": 9}, "width 9 is not a multiple of heads 2; the nearest is 8"),
        ({"positions": "transformer_xl", "width": 5, "heads": 1}, "width 5 is odd"),
    ],
    "memorizing": [
        *each(
            vocabulary=[0],
            memory_layer=[4, 0],
            memory=[-1],
            retrieved=[0],
            segment=[0],
            buckets=[3],
            dropout=[1.0],
        ),
        *each(attention_scale=[0.0]),
        ({"memory": 9}, "retrieved is 10; it must be at most memory, 9"),
        ({"max_distance": 3}, "max_distance 3 must exceed half of buckets 6"),
    ],
    "pretrained_recurrence": [
        *each(
            vocabulary=[0],
            width=[0],
            vectors=[-1],
            overlap=[6, -1],
            pooling=["median"],
            pool=["some"],
            dropout=[1.0],
        ),
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
