"""Numbers at the edge: equal tokens, tiny vocabularies and sizes, extreme logits and activations, queries that see no key."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.evaluation.generation import Sampling, draw
from accelerated.evaluation.score import Score, score_lines, score_record
from tests.conftest import examples
from tests.helpers.rollouts import agreed, back_propagated, both_sides, in_lane_1, random_rows, starting, torch_segments
from tests.helpers.variants import MORE_KINDS, ONE_OF_EACH, PAPERS, over, variant


def all_finite(paper, config, params, rows, dtype=torch.float32):
    """Whether loss, gradients and state of a rollout from a document's start are finite in dtype."""
    model = PAPERS[paper].model_with(params, config).float()
    segments = torch_segments(paper, rows, starting(0, count=len(rows)))
    found = back_propagated("through_time", model, segments, model.initial_state(2), dtype)
    return all(row.isfinite().all() for row in found.values())


def scaled(params, factor, *parts):
    """The params, multiplied by the factor if their names end with one of the parts."""
    return {name: value * factor if name.rpartition(".")[2] in parts else value for name, value in params.items()}


# Few tokens, small sizes


@over([*MORE_KINDS, ("memorizing", "all-of-memory"), ("pretrained_recurrence", "max"), ("compressive", "max_pooling-none")])
def test_a_document_of_one_repeated_token_is_finite_and_equal_on_both_sides(paper, name):
    """Over segments; lane 1 starts anew in the second. Gradients that equal keys make zero are rounding on both sides."""
    config = variant(paper, name)
    tokens = np.full((2, config.segment), config.vocabulary - 1)
    rows = [(tokens, tokens, np.ones(tokens.shape, bool))] * 3
    agreed(paper, config, rows, in_lane_1(rows), methods=("through_time",), together=True)


@over(ONE_OF_EACH)
def test_a_vocabulary_of_one_or_two_is_equal_on_both_sides(paper, name):
    """A single token is predicted at no loss and teaches nothing; a vocabulary of none is refused by name."""
    for size in (1, 2):
        config = dataclasses.replace(variant(paper, name), vocabulary=size)
        found = agreed(paper, config, random_rows(config, np.random.default_rng(0)), starting(0, 2))
        learns = [key for key, row in found.items() if not key.startswith("state") and row.any()]
        assert bool(learns) == ("loss" in learns) == (size == 2)
    with pytest.raises(ValueError, match="vocabulary is 0; it must be at least 1"):
        dataclasses.replace(variant(paper, name), vocabulary=0)


ONE = {"heads": 1, "feed_forward": 1, "segment": 1, "width": 2}  # a layer norm of one number is zero, so widths are 2
ONE_LAYER = ONE | {"layers": 1, "head_width": 1}
LEAST = {  # {paper: what changes its small config to one of everything}
    "block_recurrent": ONE_LAYER | {"window": 1, "recurrent_layers": (1,), "states": 1, "buckets": 2, "max_distance": 2},
    "compressive": ONE_LAYER | {"compression_rate": 1, "memory": 1, "compressed_memory": 1, "compression_loss": "bptt"},
    "memformer": ONE | {"head_width": 1, "slots": 1, "max_distance": 1, "encoder_layers": 1, "decoder_layers": 1},
    "memorizing": ONE_LAYER | {"memory_layer": 1, "buckets": 2, "max_distance": 2, "memory": 1, "retrieved": 1},
    "pretrained_recurrence": ONE | {"layers": 1, "max_positions": 1, "overlap": 0, "insertion_layers": (1,), "module_width": 1},
}


@pytest.mark.parametrize("paper", LEAST)
def test_the_least_sizes_in_a_single_lane_are_equal_on_both_sides(paper):
    config = dataclasses.replace(PAPERS[paper].small, **LEAST[paper])
    rows = random_rows(config, np.random.default_rng(1), lanes=1, count=4)
    agreed(paper, config, rows, starting(0, 2, count=4, lanes=1), together=True)


# Extreme numbers


@over(ONE_OF_EACH)
def test_extreme_scores_are_equal_on_both_sides_and_overflow_nowhere(paper, name, monkeypatch):
    """Logits of 10,000; then scores of as much: all weight is on one key, in float32 too."""
    config, _, params, *_ = both_sides(paper, name)
    rows, ref, largest = random_rows(config, np.random.default_rng(0)), PAPERS[paper].reference, []
    assert agreed(paper, config, rows, starting(0, 2), scaled(params, 1e5, "embedding"), together=True)["loss"] > 1e4
    params = scaled(params, 300.0, "query", "key")
    params |= {n: value * 1e4 for n, value in params.items() if n.endswith("scale") and "norm" not in n}  # of unit keys
    softmax = ref.softmax_forward

    def noted(scores):
        largest.append(np.abs(scores[np.isfinite(scores)]).max())
        return softmax(scores)

    monkeypatch.setattr(ref, "softmax_forward", noted)
    agreed(paper, config, rows, starting(0, 2), params, together=True)
    assert max(largest) > 1e4 and all_finite(paper, config, params, rows)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0), Sampling(1e-3), Sampling(top_p=0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_logits_of_ten_thousand_the_largest_is_drawn(sampling, dtype):
    logits = torch.tensor([[-1e4, 1e4, 0.0, 9e3], [-1e4, -2e4, -3e4, -4e4]], dtype=dtype)
    assert draw(logits, sampling, torch.Generator().manual_seed(0)).tolist() == [1, 0]


@pytest.mark.parametrize("nats,expected", [(math.inf, math.inf), (math.nan, math.nan), (1e308, math.inf), (709.0, math.inf)])
def test_infinite_losses_are_reported_as_such(nats, expected):
    score = Score(nats, 1, 0, 1)
    assert np.array_equal(score.perplexity(1), expected, equal_nan=True)
    record = score_record(score, (1, "words"))
    assert np.array_equal(record["bits_per_byte"], nats / math.log(2), equal_nan=True)
    assert f"perplexity          {expected:.3f}" in score_lines(score, (1, "words"), 1)


@over(ONE_OF_EACH)
@examples(3)
@given(exponent=st.sampled_from([12, *range(12)]))
def test_activations_of_a_million_millions_overflow_in_bfloat16_as_little_as_in_float32(paper, name, exponent):
    """Loss, gradients and states. (From 10^15 on products of queries, keys and gradients leave the range of both.)"""
    config, _, params, *_ = both_sides(paper, name)
    params, rows = scaled(params, 10.0**exponent, "embedding"), random_rows(config, np.random.default_rng(0), count=2)
    for dtype in (torch.float32, torch.bfloat16):
        assert all_finite(paper, config, params, rows, dtype), dtype
