"""Numbers at the edge: equal tokens, tiny vocabularies and sizes, extreme logits and activations, queries that see no key."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from accelerated import replay
from accelerated.data.lanes import Segment
from accelerated.evaluation.generation import Sampling, draw
from accelerated.evaluation.score import Score, evaluate, predictions, score_lines, score_record
from tests.conftest import examples
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import accelerated_gradients, agreed, random_rows, starting
from tests.helpers.texts import BYTES, documents_of
from tests.helpers.variants import EVERY_VARIANT, ONE_OF_EACH, PAPERS, over, variant

TASK_READERS = [("memformer", name) for name in PAPERS["memformer"].tasks]


def zero(gradients):
    """Whether all of {name: gradient} are exactly zero."""
    return not any(np.asarray(gradient).any() for gradient in gradients.values())


def all_finite(loss, gradients, state):
    """Whether no number of a rollout by a model is infinite or NaN."""
    return all(bool(each.isfinite().all()) for each in (loss, *gradients.values(), *state))


def scaled(params, factors):
    """The params, multiplied by the factor of the last part of their names, if it has one."""
    return {name: value * factors.get(name.rpartition(".")[2], 1.0) for name, value in params.items()}


# Few tokens, small sizes


@over(EVERY_VARIANT)
def test_a_document_of_one_repeated_token_is_finite_and_equal_on_both_sides(paper, name):
    """Over segments; lane 1 starts anew in the last. Gradients that equal keys make zero are rounding on both sides."""
    config = variant(paper, name)
    tokens = np.full((2, config.segment), config.vocabulary - 1)
    starts = [np.array([True, True]), np.array([False, False]), np.array([False, True])]
    segments = [(tokens, tokens, np.ones(tokens.shape, bool))] * 3
    agreed(paper, config, segments, starts, methods=("through_time",), together=True)


@over(ONE_OF_EACH)
def test_a_vocabulary_of_one_is_predicted_at_no_loss_and_teaches_nothing(paper, name):
    config = dataclasses.replace(variant(paper, name), vocabulary=1)
    loss, gradients, _ = agreed(paper, config, random_rows(config, np.random.default_rng(0)), starting(0, 2))
    assert loss == 0 and zero(gradients)


@over(ONE_OF_EACH)
def test_a_vocabulary_of_two_is_equal_on_both_sides(paper, name):
    config = dataclasses.replace(variant(paper, name), vocabulary=2)
    loss, gradients, _ = agreed(paper, config, random_rows(config, np.random.default_rng(0)), starting(0, 2))
    assert loss > 0 and not zero(gradients)


@pytest.mark.parametrize("paper", PAPERS)
def test_a_vocabulary_of_none_is_refused_by_name(paper):
    with pytest.raises(ValueError, match="vocabulary is 0; it must be at least 1"):
        dataclasses.replace(PAPERS[paper].small, vocabulary=0)


ONE = {"heads": 1, "feed_forward": 1, "segment": 1}
LEAST = {  # {paper: configs that change the small one}; a layer norm of one number is zero, so widths are 2
    "block_recurrent": [
        ONE
        | {"width": 2, "layers": 1, "head_width": 1, "window": 1, "recurrent_layers": (1,), "states": 1, "gate": gate}
        | {"configuration": configuration, "buckets": 2, "max_distance": 2}
        for gate, configuration in (("fixed", "skip"), ("lstm", "dual"), ("fixed", "single"))
    ],
    "compressive": [
        ONE | {"width": 2, "layers": 1, "head_width": 1, "compression_rate": 1} | sizes
        for sizes in (
            {"memory": 0, "compressed_memory": 0},
            {"memory": 1, "compressed_memory": 0},
            {"memory": 0, "compressed_memory": 1},
            {"memory": 1, "compressed_memory": 1, "compression_loss": "bptt"},
            {"memory": 0, "compressed_memory": 1, "segment": 4, "compression_rate": 4},
        )
    ],
    "memformer": [
        ONE | {"width": 2, "head_width": 1, "slots": 1, "max_distance": 1, "decoder_layers": 1} | sizes
        for sizes in ({"encoder_layers": 1}, {"encoder_layers": 0}, {"encoder_layers": 1, "positions": "transformer_xl"})
    ],
    "memorizing": [
        ONE | {"width": 2, "layers": 1, "head_width": 1, "memory_layer": 1, "buckets": 2, "max_distance": 2} | sizes
        for sizes in ({"memory": 1, "retrieved": 1}, {"memory": 0}, {"memory": 2, "segment": 3, "retrieved": 2})
    ],
    "pretrained_recurrence": [
        ONE | {"width": 2, "layers": 1, "max_positions": 1, "overlap": 0, "insertion_layers": (1,), "module_width": 1} | sizes
        for sizes in ({"vectors": 1}, {"vectors": 0}, {"vectors": 1, "pooling": "attention", "module_layers": 0})
    ],
}


@pytest.mark.parametrize("paper,number", [(paper, number) for paper, sizes in LEAST.items() for number in range(len(sizes))])
def test_the_least_sizes_in_a_single_lane_are_equal_on_both_sides(paper, number):
    """One of everything that there may be one of, and none where there may be none."""
    config = dataclasses.replace(PAPERS[paper].small, **LEAST[paper][number])
    segments = random_rows(config, np.random.default_rng(1), lanes=1, count=4)
    agreed(paper, config, segments, starting(0, 2, count=4, lanes=1), together=True)


# Extreme numbers


def with_large_logits(paper, name):
    """(float32 model with logits of 10,000 and more, a Segment of two lanes that start)."""
    torch.set_default_dtype(torch.float32)
    config, rng = variant(paper, name), np.random.default_rng(2)
    params = PAPERS[paper].random_params(config, rng)
    tokens, targets = (torch.tensor(rng.integers(config.vocabulary, size=(2, config.segment))) for _ in range(2))
    model = PAPERS[paper].model_with(params, config).float()
    with torch.no_grad():
        while (logits := model(tokens, model.initial_state(2)).logits).abs().max() < 1e4:
            model.embedding *= 4
    assert logits.max() > 1e3 and logits.min() < -1e3
    return model, Segment(tokens, targets, tokens >= 0, torch.ones(2, dtype=torch.bool))


@over(ONE_OF_EACH)
@pytest.mark.parametrize("chunk", [30, replay.CHUNK], ids=["chunks", "at once"])
def test_a_float32_loss_of_logits_of_ten_thousand_is_that_of_float64(paper, name, chunk, monkeypatch):
    """In training and in evaluation, from the same hidden rows; all gradients are finite."""
    monkeypatch.setattr(replay, "CHUNK", chunk)
    model, segment = with_large_logits(paper, name)
    hidden, matrix = model.read(segment.tokens, model.initial_state(2)).hidden, model.output_matrix()
    exact = functional.linear(hidden.double(), matrix.double()).log_softmax(-1)
    exact = -exact.gather(-1, segment.targets[..., None])[..., 0]
    nats = replay.summed_nats(hidden, matrix, segment.targets)
    assert_agree({"nats": exact.sum()[None]}, {"nats": nats[None]}, 1e-6)
    assert_agree({"nats": exact}, {"nats": predictions(model, hidden, segment).nats}, 1e-6)
    nats.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@over(ONE_OF_EACH)
def test_logits_of_ten_thousand_are_equal_on_both_sides_and_overflow_nowhere(paper, name):
    config = variant(paper, name)
    params = scaled(PAPERS[paper].random_params(config, np.random.default_rng(5)), {"embedding": 1e5})
    loss, _, _ = agreed(paper, config, random_rows(config, np.random.default_rng(0)), starting(0, 2), params, together=True)
    assert loss > 1e4


@over(ONE_OF_EACH)
def test_rows_of_attention_with_one_dominant_key_are_equal_on_both_sides(paper, name, monkeypatch):
    """Scores of thousands: all weight is on one key, and no exponential overflows."""
    config, ref, largest = variant(paper, name), PAPERS[paper].reference, []
    params = scaled(PAPERS[paper].random_params(config, np.random.default_rng(5)), {"query": 300.0, "key": 300.0})
    params |= {n: value * 1e4 for n, value in params.items() if n.endswith("scale") and "norm" not in n}  # of unit keys
    softmax = ref.softmax_forward

    def noted(scores):
        largest.append(np.abs(scores[np.isfinite(scores)]).max())
        return softmax(scores)

    monkeypatch.setattr(ref, "softmax_forward", noted)
    segments, starts = random_rows(config, np.random.default_rng(0)), starting(0, 2)
    agreed(paper, config, segments, starts, params, together=True)
    assert max(largest) > 1e4
    model = PAPERS[paper].model_with(params, config).float()
    assert all_finite(*accelerated_gradients(paper, model, segments, starts, dtype=torch.float32))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0), Sampling(1e-3), Sampling(top_p=0.5)])
def test_of_logits_of_ten_thousand_the_largest_is_drawn(sampling):
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[-1e4, 1e4, 0.0, 9e3], [-1e4, -2e4, -3e4, -4e4]], dtype=dtype)
        assert draw(logits, sampling, torch.Generator().manual_seed(0)).tolist() == [1, 0]


@over(ONE_OF_EACH)
def test_a_perplexity_beyond_a_double_is_reported_as_infinite(paper, name):
    """Of a model that is sure of wrong tokens; its bits are finite."""
    config = dataclasses.replace(variant(paper, name), vocabulary=256)
    model = PAPERS[paper].model(config)
    with torch.no_grad():
        model.embedding *= 1e6
    score = evaluate(model, documents_of([30, 20]), BYTES, 2)
    assert math.isfinite(score.bits_per_byte) and score.perplexity(score.tokens) == math.inf
    assert score_record(score, (1, "words"))["word_perplexity"] == math.inf
    assert "perplexity          inf" in score_lines(score, (1, "words"), 1)


@pytest.mark.parametrize("nats,expected", [(math.inf, math.inf), (math.nan, math.nan), (1e308, math.inf), (709.0, math.inf)])
def test_infinite_losses_are_reported_as_such(nats, expected):
    score = Score(nats, 1, 0, 1)
    assert np.array_equal(score.perplexity(1), expected, equal_nan=True)
    record = score_record(score, (1, "words"))
    assert np.array_equal(record["bits_per_byte"], nats / math.log(2), equal_nan=True)
    assert f"perplexity          {expected:.3f}" in score_lines(score, (1, "words"), 1)


@over(ONE_OF_EACH)
@examples(8)
@given(exponent=st.integers(0, 12))
def test_activations_of_a_million_millions_overflow_in_bfloat16_as_little_as_in_float32(paper, name, exponent):
    """Loss, gradients and states. (From 10^15 on products of queries, keys and gradients leave the range of both.)"""
    config = variant(paper, name)
    params = scaled(PAPERS[paper].random_params(config, np.random.default_rng(5)), {"embedding": 10.0**exponent})
    segments, model = random_rows(config, np.random.default_rng(0), count=2), PAPERS[paper].model_with(params, config).float()
    for dtype in (torch.float32, torch.bfloat16):
        assert all_finite(*accelerated_gradients(paper, model, segments, starting(0, count=2), dtype=dtype)), dtype


# Queries that see no key (tests/data/test_tasks.py: no text that an encoder reads is empty)


@over([("pretrained_recurrence", name) for name in ("overlapping", "several-vectors", "at-every-layer", "one-token")])
def test_before_a_first_window_there_is_nothing_to_see(paper, name):
    """Whatever the state holds there: nothing of it is read, and it gets no gradient; nor does the module."""
    config, ref = variant(paper, name), PAPERS[paper].reference
    params = PAPERS[paper].random_params(config, np.random.default_rng(5))
    [segment] = random_rows(config, np.random.default_rng(0), count=1)
    model = PAPERS[paper].model_with(params, config)
    found = []
    for value in (0.0, 1e30):
        state = ref.State(np.full((2, config.width), value), np.zeros(2, bool))
        logits, _, cache = ref.forward(params, config, segment[0], state)
        grads, dstate = ref.backward(params, config, cache, np.ones_like(logits))
        own = PAPERS[paper].to_torch(state)
        own.pooled.requires_grad_()
        model.zero_grad()
        read = model(torch.tensor(segment[0]), own).logits
        read.sum().backward()
        assert not dstate.pooled.any() and (own.pooled.grad is None or not own.pooled.grad.any())
        modules = {n: p.grad for n, p in model.named_parameters() if n.startswith("module.") and p.grad is not None}
        assert zero({n: g for n, g in grads.items() if n.startswith("module.")}) and zero(modules)
        found.append((logits, read.detach()))
    assert (found[0][0] == found[1][0]).all() and torch.equal(found[0][1], found[1][1])
