"""RoBERTa with recurrence in PyTorch: transformers' RoBERTa judges its windows and its layers."""

import dataclasses
import json
import shutil

import pytest
import torch
from torch.nn import functional

from accelerated.lab.systems.roberta import Config, Roberta, Window
from accelerated.lab.systems.roberta_weights import described_config, load_roberta
from tests.helpers.comparison import assert_agree
from tests.helpers.programs import refusal

ROBERTA = Config(
    vocabulary=11,
    width=6,
    layers=3,
    heads=2,
    feed_forward=7,
    segment=8,
    module_width=5,
    dropout=0.0,
)
# Of the example: span, no, span; the places of start and end among the tokens of all windows
KIND = torch.tensor([0, 2, 0])
PLACES = torch.tensor([[11, 13], [0, 0], [4, 14]])


def opened(folder, segment, recurrent, seed):
    """The model of a RoBERTa's folder."""
    config = described_config(folder, segment)
    return load_roberta(folder, dataclasses.replace(config, recurrent=recurrent), seed)


def random_model(seed, **changes):
    """A model whose parameters are away from where they begin, so that every term has an effect."""
    torch.manual_seed(seed)
    model = Roberta(dataclasses.replace(ROBERTA, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def example():
    """Three windows of three lanes; lane 0 has padding, and lane 2 ends before the others."""
    windows = []
    for k in range(3):
        readable = torch.ones(3, 8, dtype=torch.bool)
        readable[0, 6:] = False
        readable[2] = k < 2
        text = readable.clone()
        text[:, :3] = False
        windows.append(Window(torch.randint(ROBERTA.vocabulary, (3, 8)), readable, text))
    return windows


@torch.no_grad()
def outputs_of(model, windows):
    """The outputs of all windows, and the last state."""
    state = model.initial_state(3)
    found = []
    for window in windows:
        x, state = model(window.tokens, window.readable, state)
        found.append(x)
    return found, state


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_window_knows_of_earlier_ones_through_the_vector_alone(recurrent):
    """A lane's first window changes its second one's outputs if the model is recurrent.

    And no other lane's at all.
    """
    model = random_model(5, recurrent=recurrent)
    first, *others = example()
    changed = first._replace(tokens=(first.tokens + torch.tensor([[1], [0], [0]])) % 11)
    (_, second, *_), _ = outputs_of(model, [first, *others])
    (_, other, *_), _ = outputs_of(model, [changed, *others])
    difference = (second - other).abs().amax((1, 2))
    assert (difference[0] > 1e-6) == recurrent
    assert not difference[1:].any(), "another lane's window is read"


def test_the_state_is_the_mean_and_the_maximum_over_windows():
    windows = example()
    outputs, state = outputs_of(random_model(6), windows)
    for lane in range(3):
        read = [k for k, window in enumerate(windows) if window.readable[lane, 0]]
        last = read[-1]
        mean = outputs[last][lane][windows[last].readable[lane]].mean(0)
        firsts = torch.stack([outputs[k][lane, 0] for k in read])
        torch.testing.assert_close(state.pooled[lane], mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(state.first[lane], firsts.amax(0))
    assert state.present.all()
    assert len(read) < len(windows), "the last lane's example ends before the others"


def test_an_answer_is_looked_for_in_all_of_the_text_and_nowhere_else():
    """The loss: -log p of the kind, and half of the start's and the end's if it is a span."""
    model = random_model(8)
    windows = example()
    spans, kinds = model.read(windows)
    assert spans.shape == (3, 2, 3 * ROBERTA.segment)
    text = torch.cat([window.text for window in windows], 1)
    assert torch.equal(spans[:, 0].isfinite(), text)

    expected = 0
    for lane, kind in enumerate(KIND):
        expected -= kinds[lane].log_softmax(-1)[kind]
        if kind == 0:
            start, end = PLACES[lane]
            of_places = spans[lane].log_softmax(-1)
            expected -= 0.5 * (of_places[0, start] + of_places[1, end])
    loss = model.answer_loss(windows, KIND, PLACES)
    torch.testing.assert_close(loss, expected / 3, rtol=1e-12, atol=0)


def test_dropout_acts_in_training_alone():
    model = random_model(2, dropout=0.4)
    windows = example()
    loss = model.answer_loss(windows, KIND, PLACES)
    assert model.answer_loss(windows, KIND, PLACES) == loss
    model.train()
    assert model.answer_loss(windows, KIND, PLACES) != loss


REFUSED = [
    ({"insertion_layer": 4}, r"insertion_layer is 4; it must lie in 1\.\.3"),
    ({"insertion_layer": 0}, "insertion_layer is 0"),
    ({"heads": 4}, "width 6 is not a multiple of heads 4; the nearest is 8"),
    ({"module_layers": -1}, "module_layers is -1"),
    ({"dropout": 1.0}, "dropout is 1.0"),
]


@pytest.mark.parametrize("change,words", REFUSED, ids=str)
def test_impossible_configs_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(ROBERTA, **change)


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


def test_a_later_window_is_transformers_with_a_token_more_at_one_layer(folder):
    """The vector stands before the second layer's input, and what comes out in its place is left.

    The network that makes the vector is GELU between matrices.
    """
    import transformers

    theirs = transformers.RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    model = opened(folder, 14, True, 0).eval()
    state = model.initial_state(2)
    state = state._replace(pooled=torch.randn(2, 12), present=torch.tensor([True, True]))
    tokens = torch.randint(2, 40, (2, 14))
    module = model.module
    with torch.no_grad():
        vector = state.pooled
        for name in ("hidden_1", "hidden_2"):
            vector = functional.gelu(
                functional.linear(vector, module[name], module[f"{name}_bias"])
            )
        vector = functional.linear(vector, module["inserted"], module["inserted_bias"])

        first, second, third = theirs.roberta.encoder.layer
        x = output_of(first, theirs.roberta.embeddings(tokens))
        x = output_of(second, torch.cat([vector[:, None], x], 1))[:, 1:]
        expected = output_of(third, x)
        x, _ = model(tokens, torch.ones(2, 14, dtype=torch.bool), state)
    assert_agree(expected, x, 1e-9)


def output_of(layer, x):
    """A layer of transformers: some versions return a tuple."""
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out


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
