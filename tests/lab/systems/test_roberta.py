"""RoBERTa with recurrence in PyTorch has the reference's numbers.

A first window is that of transformers' RoBERTa.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems.roberta import Roberta, Window
from accelerated.lab.systems.roberta_weights import described_config, load_roberta
from reference import roberta as ref
from tests.conftest import examples
from tests.helpers.comparison import assert_agree, named
from tests.helpers.programs import refusal
from tests.helpers.roberta import ROBERTA, roberta_example, roberta_params


def opened(folder, segment, recurrent, seed):
    """The model of a RoBERTa's folder."""
    config = described_config(folder, segment)
    return load_roberta(folder, dataclasses.replace(config, recurrent=recurrent), seed)


class Drawn:
    """A reference's parameters, a model with them in evaluation mode, and an example."""

    def __init__(self, config, seed):
        rng = np.random.default_rng(seed)
        self.params = roberta_params(config, rng)
        self.windows, self.answer = roberta_example(config, rng)
        self.model = Roberta(config).eval()
        params = {name: torch.tensor(value) for name, value in self.params.items()}
        self.model.load_state_dict(params)

    def answer_loss(self):
        """The model's loss of the answer."""
        windows = [Window(*map(torch.tensor, window)) for window in self.windows]
        places = np.stack([self.answer.start, self.answer.end], 1)
        kind = torch.tensor(self.answer.kind)
        return self.model.answer_loss(windows, kind, torch.tensor(places))


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
    """Of answering over windows; of parameters that the loss does not reach they are zero."""
    own = Drawn(config, seed)
    expected, grads = ref.loss_and_gradients(own.params, config, own.windows, own.answer)
    loss = own.answer_loss()
    parameters = dict(own.model.named_parameters())
    found = torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True)
    found = dict(zip(parameters, found, strict=True))
    assert_agree({"loss": expected} | grads, {"loss": loss} | found, 1e-9)


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


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_first_window_is_that_of_transformers_roberta(folder, recurrent):
    """Of the folder that it saved, with recurrence too, because nothing is inserted.

    The pretraining's loss is the same; the windows may be shorter than its positions.
    """
    import transformers

    theirs = transformers.RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    model = opened(folder, 14, recurrent, 0).eval()
    assert model.config.segment == 14

    tokens = torch.randint(2, 40, (2, 14))
    readable = torch.ones(2, 14, dtype=torch.bool)
    tokens[1, 11:] = 1
    readable[1, 11:] = False
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), output_hidden_states=True)
        x, _ = model(tokens, readable, model.initial_state(2))
        scored = tokens % 3 == 0
        tokens, targets = torch.randint(2, 40, (2, *tokens.shape))
        loss = model.masked_loss(tokens, targets, scored)
        labels = targets.where(scored, -100)  # which transformers leaves out
        expected_loss = theirs(tokens, labels=labels).loss
    outputs = expected.hidden_states[-1]
    wanted = {"outputs": outputs[readable], "loss": expected_loss}
    assert_agree(wanted, {"outputs": x[readable], "loss": loss}, 1e-9)


def test_the_seed_draws_what_a_published_roberta_has_not(folder):
    """The answer's head and the vector's network."""
    first = opened(folder, 16, True, 0).state_dict()
    second = opened(folder, 16, True, 1).state_dict()
    drawn = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert {"answer.span", "answer.kind", "module.inserted", "module.hidden_1"} <= drawn
    assert all(name.startswith(("answer.", "module.")) for name in drawn)


FAULTS = {  # {what: (the changes of config.json, the message)}
    "another model": ({"model_type": "bert"}, "has model_type 'bert', our model has 'roberta'"),
    "another norm": ({"layer_norm_eps": 1e-12}, "has layer_norm_eps 1e-12, our model has"),
    "heads": ({"num_attention_heads": 5}, "describes no RoBERTa (width 12 is not a multiple"),
    "few positions": ({"max_position_embeddings": 17}, "--segment 16: "),
    "more layers": ({"num_hidden_layers": 4}, "has no roberta.encoder.layer.3.attention."),
    "another width": ({"intermediate_size": 21}, "cannot be used ("),
    "no RoBERTa": ({"model_type": None}, "cannot be used ("),
}


@pytest.mark.parametrize("what", FAULTS)
def test_another_model_is_refused(folder, tmp_path, what):
    changed, message = FAULTS[what]
    own = shutil.copytree(folder, tmp_path / "roberta")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | changed))
    assert message in refusal(opened, own, 16, True, 0)
