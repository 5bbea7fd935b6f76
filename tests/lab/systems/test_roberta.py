"""RoBERTa with recurrence in PyTorch has the reference's numbers; a first window is that of transformers' RoBERTa."""

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


def drawn(config, seed):
    """(rng, the reference's parameters, a model with them in evaluation mode, an example, what answer_loss takes of it)."""
    rng = np.random.default_rng(seed)
    params, (windows, answer) = roberta_params(config, rng), roberta_example(config, rng)
    model = Roberta(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
    places = torch.tensor(np.stack([answer.start, answer.end], 1))
    asked = (
        [Window(*map(torch.tensor, window)) for window in windows],
        torch.tensor(answer.kind),
        places,
    )
    return rng, params, model.eval(), (windows, answer), asked


def compare(model, loss, expected, grads):
    """The loss and the gradients of all parameters; of those that it does not reach they are zero."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True)
    assert_agree(
        {"loss": expected} | grads, {"loss": loss} | dict(zip(parameters, found, strict=True)), 1e-9
    )


@examples(12)
@given(
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 8),
    st.integers(0, 2**31),
)
def test_it_is_the_reference(recurrent, layers, insertion, module_layers, length, seed):
    """Outputs and states, of shorter windows too, losses and all gradients, of answering over windows and of the pretraining."""
    sizes = {
        "recurrent": recurrent,
        "layers": layers,
        "insertion_layer": min(insertion, layers),
        "module_layers": module_layers,
    }
    config = dataclasses.replace(ROBERTA, **sizes)
    rng, params, model, (windows, answer), asked = drawn(config, seed)
    state, own = ref.initial_state(params, config, 3), model.initial_state(3)
    for tokens, readable, _ in windows:
        shorter = tokens[:, :length], readable[:, :length]
        expected, state, _ = ref.forward(params, config, *shorter, state)
        x, own = model(*map(torch.tensor, shorter), own)
        assert_agree({"x": expected} | named("state", state), {"x": x} | named("state", own), 1e-9)
    compare(
        model, model.answer_loss(*asked), *ref.loss_and_gradients(params, config, windows, answer)
    )
    targets, scored = (
        rng.integers(config.vocabulary, size=(3, config.segment)),
        rng.random((3, config.segment)) < 0.5,
    )
    scored[0, 0] = True
    given_ = windows[0][0], targets, scored
    compare(
        model,
        model.masked_loss(*map(torch.tensor, given_)),
        *ref.masked_loss_and_gradients(params, config, *given_),
    )


def test_a_seed_gives_the_references_weights():
    params = ref.init_params(ROBERTA, np.random.default_rng(7))
    assert all(
        torch.equal(value, torch.tensor(params[name]))
        for name, value in Roberta(ROBERTA, seed=7).state_dict().items()
    )


def test_dropout_acts_in_training_alone():
    _, _, model, _, asked = drawn(dataclasses.replace(ROBERTA, dropout=0.4), 2)
    losses = [model.train(training).answer_loss(*asked) for training in (False, False, True)]
    assert losses[0] == losses[1] != losses[2]


OF_A_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
}
OF_A_LAYER |= {"output": "attention.output.dense", "norm": "attention.output.LayerNorm"}
OF_A_LAYER |= {
    "mlp_hidden": "intermediate.dense",
    "mlp_output": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
OTHERS = {
    "embedding_norm": "embeddings.LayerNorm",
    "masked.hidden": "lm_head.dense",
    "masked.norm": "lm_head.layer_norm",
}


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_first_window_is_that_of_transformers_roberta(recurrent):
    """With recurrence too, because nothing is inserted. Their positions count from the padding's id on, 1, and have a type."""
    transformers = pytest.importorskip(
        "transformers", reason="needs the package transformers, to compare with"
    )
    sizes = {
        "vocab_size": 40,
        "hidden_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 20,
    }
    sizes |= {"max_position_embeddings": 18, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    theirs = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**sizes)).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    weights = {name.removeprefix("roberta."): value for name, value in theirs.state_dict().items()}
    rows = (
        weights["embeddings.position_embeddings.weight"][2:]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    ours = {
        "positions": rows,
        "embedding": weights["embeddings.word_embeddings.weight"],
        "masked.bias": weights["lm_head.bias"],
    }
    of_layers = {
        f"layers.{i}.{own}": f"encoder.layer.{i}.{name}"
        for i in range(3)
        for own, name in OF_A_LAYER.items()
    }
    for name, other in (of_layers | OTHERS).items():
        weight, bias = (".scale", ".bias") if name.endswith("norm") else ("", "_bias")
        ours |= {name + weight: weights[f"{other}.weight"], name + bias: weights[f"{other}.bias"]}
    model = Roberta(
        Roberta.Config(40, 12, 3, 3, 20, 16, recurrent=recurrent, module_width=5, dropout=0.0)
    ).eval()
    model.load_state_dict(model.state_dict() | ours)
    tokens, readable = torch.randint(2, 40, (2, 16)), torch.ones(2, 16, dtype=torch.bool)
    tokens[1, 11:], readable[1, 11:] = 1, False
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), output_hidden_states=True)
        x, _ = model(tokens, readable, model.initial_state(2))
        logits = model.masked(x, model.embedding)
    outputs = {"outputs": expected.hidden_states[-1][readable], "logits": expected.logits[readable]}
    assert_agree(outputs, {"outputs": x[readable], "logits": logits[readable]}, 1e-9)
