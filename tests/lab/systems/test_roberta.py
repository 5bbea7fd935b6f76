"""RoBERTa with recurrence in PyTorch has the reference's numbers.

A first window is that of transformers' RoBERTa.
"""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems.roberta import Roberta, Window
from reference import roberta as ref
from tests.conftest import examples
from tests.helpers.comparison import assert_agree, named
from tests.helpers.roberta import ROBERTA, roberta_example, roberta_params


class Drawn:
    """A reference's parameters, a model with them in evaluation mode, and an example."""

    def __init__(self, config, seed):
        self.config = config
        self.rng = np.random.default_rng(seed)
        self.params = roberta_params(config, self.rng)
        self.windows, self.answer = roberta_example(config, self.rng)
        self.model = Roberta(config).eval()
        params = {name: torch.tensor(value) for name, value in self.params.items()}
        self.model.load_state_dict(params)

    def answer_loss(self):
        """The model's loss of the answer."""
        windows = [Window(*map(torch.tensor, window)) for window in self.windows]
        places = np.stack([self.answer.start, self.answer.end], 1)
        kind = torch.tensor(self.answer.kind)
        return self.model.answer_loss(windows, kind, torch.tensor(places))

    def compare(self, loss, expected, grads):
        """The loss and the gradients of all parameters.

        Of those that it does not reach they are zero.
        """
        parameters = dict(self.model.named_parameters())
        found = torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True)
        found = dict(zip(parameters, found, strict=True))
        assert_agree({"loss": expected} | grads, {"loss": loss} | found, 1e-9)


@st.composite
def configs(draw):
    """A Config of any depth, with recurrence or without."""
    layers = draw(st.integers(1, 3))
    return dataclasses.replace(
        ROBERTA,
        recurrent=draw(st.booleans()),
        layers=layers,
        insertion_layer=draw(st.integers(1, layers)),
        module_layers=draw(st.integers(0, 2)),
    )


seeds = st.integers(0, 2**31)


@examples(12)
@given(configs(), st.integers(1, 8), seeds)
def test_outputs_and_states_are_the_references(config, length, seed):
    """Of shorter windows too."""
    own = Drawn(config, seed)
    expected_state = ref.initial_state(own.params, config, 3)
    state = own.model.initial_state(3)
    for tokens, readable, _ in own.windows:
        shorter = (tokens[:, :length], readable[:, :length])
        expected, expected_state, _ = ref.forward(own.params, config, *shorter, expected_state)
        x, state = own.model(*map(torch.tensor, shorter), state)
        rows = {"x": expected} | named("state", expected_state)
        assert_agree(rows, {"x": x} | named("state", state), 1e-9)


@examples(12)
@given(configs(), seeds)
def test_losses_and_gradients_are_the_references(config, seed):
    """Of answering over windows, and of the pretraining."""
    own = Drawn(config, seed)
    expected = ref.loss_and_gradients(own.params, config, own.windows, own.answer)
    own.compare(own.answer_loss(), *expected)

    tokens = own.windows[0][0]
    targets = own.rng.integers(config.vocabulary, size=tokens.shape)
    scored = own.rng.random(tokens.shape) < 0.5
    scored[0, 0] = True
    masked = (tokens, targets, scored)
    expected = ref.masked_loss_and_gradients(own.params, config, *masked)
    own.compare(own.model.masked_loss(*map(torch.tensor, masked)), *expected)


def test_a_seed_gives_the_references_weights():
    params = ref.init_params(ROBERTA, np.random.default_rng(7))
    for name, value in Roberta(ROBERTA, seed=7).state_dict().items():
        assert torch.equal(value, torch.tensor(params[name]))


def test_dropout_acts_in_training_alone():
    own = Drawn(dataclasses.replace(ROBERTA, dropout=0.4), 2)
    loss = own.answer_loss()
    assert own.answer_loss() == loss
    own.model.train()
    assert own.answer_loss() != loss


# {ours: theirs}; a norm has a scale and a bias, others a matrix and a bias
OF_A_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "mlp_hidden": "intermediate.dense",
    "mlp_output": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
OTHERS = {
    "embedding_norm": "embeddings.LayerNorm",
    "masked.hidden": "lm_head.dense",
    "masked.norm": "lm_head.layer_norm",
}


def their_model():
    """transformers' RoBERTa with three layers and weights away from where they begin."""
    transformers = pytest.importorskip(
        "transformers", reason="needs the package transformers, to compare with"
    )
    config = transformers.RobertaConfig(
        vocab_size=40,
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=18,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    model = transformers.RobertaForMaskedLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def our_weights(theirs):
    """Their weights by our names.

    Their positions count from the padding's id on, 1, and have a type.
    """
    weights = {name.removeprefix("roberta."): value for name, value in theirs.items()}
    positions = weights["embeddings.position_embeddings.weight"][2:]
    ours = {
        "positions": positions + weights["embeddings.token_type_embeddings.weight"][0],
        "embedding": weights["embeddings.word_embeddings.weight"],
        "masked.bias": weights["lm_head.bias"],
    }
    names = dict(OTHERS)
    for layer in range(3):
        for own, other in OF_A_LAYER.items():
            names[f"layers.{layer}.{own}"] = f"encoder.layer.{layer}.{other}"
    for own, other in names.items():
        if own.endswith("norm"):
            matrix, bias = f"{own}.scale", f"{own}.bias"
        else:
            matrix, bias = own, f"{own}_bias"
        ours[matrix] = weights[f"{other}.weight"]
        ours[bias] = weights[f"{other}.bias"]
    return ours


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_first_window_is_that_of_transformers_roberta(recurrent):
    """With recurrence too, because nothing is inserted."""
    theirs = their_model()
    sizes = (40, 12, 3, 3, 20, 16)
    config = ref.Config(*sizes, recurrent=recurrent, module_width=5, dropout=0.0)
    model = Roberta(config).eval()
    model.load_state_dict(model.state_dict() | our_weights(theirs.state_dict()))

    tokens = torch.randint(2, 40, (2, 16))
    readable = torch.ones(2, 16, dtype=torch.bool)
    tokens[1, 11:] = 1
    readable[1, 11:] = False
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), output_hidden_states=True)
        x, _ = model(tokens, readable, model.initial_state(2))
        logits = model.masked(x, model.embedding)
    outputs = expected.hidden_states[-1]
    wanted = {"outputs": outputs[readable], "logits": expected.logits[readable]}
    assert_agree(wanted, {"outputs": x[readable], "logits": logits[readable]}, 1e-9)
