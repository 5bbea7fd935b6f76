"""Adaptive inputs and adaptive softmax: both sides equal torch's module and each other."""

import dataclasses

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from accelerated.compressive import Compressive
from accelerated.replay import IGNORED, cross_entropy_sum, target_cross_entropy
from reference import compressive as ref
from reference.variants import compressive as variants
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import gradients
from tests.helpers.variants import PAPERS

SMALL = PAPERS["compressive"].small


@st.composite
def settings(draw):
    """A Config with one to three tails, random parameters, the model with them and a generator."""
    vocabulary = draw(st.integers(4, 13))
    cutoffs = draw(st.sets(st.integers(1, vocabulary - 1), min_size=1, max_size=3))
    config = dataclasses.replace(
        SMALL,
        layers=1,
        vocabulary=vocabulary,
        width=8,
        cutoffs=tuple(sorted(cutoffs)),
        div_value=draw(st.integers(1, 2)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    params = PAPERS["compressive"].random_params(config, rng)
    return config, params, PAPERS["compressive"].model_with(params, config), rng


def torchs(config, params):
    """torch.nn.AdaptiveLogSoftmaxWithLoss, which is not ours, with the reference's parameters."""
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(
        config.width,
        config.vocabulary,
        config.cutoffs,
        float(config.div_value),
        dtype=torch.float64,
    )
    tails = [ref.subtree(params, f"tails.{i}.") for i in range(len(config.cutoffs))]
    state = {"head.weight": np.concatenate([params["embedding"], params["clusters"]])}
    state |= {f"tail.{i}.0.weight": tail["projection"].T for i, tail in enumerate(tails)}
    state |= {f"tail.{i}.1.weight": tail["embedding"] for i, tail in enumerate(tails)}
    module.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return module


@given(settings())
def test_the_softmax_is_torchs(setting):
    """Log-probabilities of all words on both sides."""
    config, params, model, rng = setting
    x = rng.standard_normal((2, 5, config.width))
    expected = torchs(config, params).log_prob(torch.tensor(x).flatten(0, 1)).view(2, 5, -1)
    by_numpy, _ = variants.adaptive_softmax_forward(params, config, x)
    by_torch = model.output_matrix().log_probabilities(torch.tensor(x))
    assert_agree(
        {"NumPy": expected, "PyTorch": expected}, {"NumPy": by_numpy, "PyTorch": by_torch}, 1e-12
    )


def by_log_probabilities(x, matrix, targets):
    """The loss of targets with all log-probabilities written out."""
    logs = matrix.log_probabilities(x)
    return functional.nll_loss(logs, targets, reduction="sum", ignore_index=IGNORED)


@given(settings(), st.floats(0, 1))
def test_a_loss_of_targets_is_that_of_all_log_probabilities(setting, ignored):
    """With the gradients of the rows and of every parameter.

    Ignored targets, and tails without a target, count nothing.
    """
    config, _, model, rng = setting
    rows = rng.standard_normal((10, config.width))
    targets = torch.tensor(rng.integers(config.vocabulary, size=10))
    targets[torch.tensor(rng.random(10)) < ignored] = IGNORED

    def results(loss_of):
        model.zero_grad()
        x = torch.tensor(rows, requires_grad=True)
        loss = loss_of(x, model.output_matrix(), targets)
        loss.backward()
        return {"loss": loss, "x": x.grad} | gradients(model)

    def by_tails(x, matrix, aims):
        return matrix.cross_entropy_sum(x, aims, aims.numpy(), cross_entropy_sum)

    expected = results(by_log_probabilities)
    assert_agree(
        expected, results(lambda x, m, t: target_cross_entropy(x[None], m, t[None])), 1e-12
    )
    assert_agree(expected, results(by_tails), 1e-12)


@given(settings())
def test_inputs_are_rows_of_the_joined_tables(setting):
    config, params, model, rng = setting
    tables = [params["embedding"]]
    for number in range(len(config.cutoffs)):
        tail = ref.subtree(params, f"tails.{number}.")
        tables.append(tail["embedding"] @ tail["projection"].T)
    table = np.concatenate(tables)
    every_token = np.arange(config.vocabulary)
    tokens = np.concatenate([every_token, rng.integers(config.vocabulary, size=4)])[None]
    found = {"reference": variants.adaptive_embedding_forward(params, config, tokens)[0]}
    found["accelerated"] = model.output_matrix().embed(torch.tensor(tokens))
    assert_agree(dict.fromkeys(found, table[tokens]), found, 1e-14)


def test_losses_are_float32_in_a_model_of_bfloat16():
    config = dataclasses.replace(SMALL, cutoffs=(3, 7), div_value=2)
    matrix = Compressive(config).to(torch.bfloat16).output_matrix()
    hidden = torch.randn(2, 3, config.width, dtype=torch.bfloat16)
    targets = torch.tensor([[0, 4, 9], [1, 2, 2]])
    assert matrix.log_probabilities(hidden).dtype == torch.float32
    assert target_cross_entropy(hidden, matrix, targets).dtype == torch.float32
