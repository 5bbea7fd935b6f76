"""RoBERTa with recurrence in PyTorch: the reference's numbers, and those of transformers' RoBERTa from its own file."""

import dataclasses

import numpy as np
import pytest
import torch
from comparison import assert_agree
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from roberta import CONFIG, example, shaken

from accelerated.lab.systems.roberta import Answer, Roberta, load_published
from accelerated.program.errors import InputError
from reference import roberta as ref


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)


def model_with(params, config):
    model = Roberta(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
    return model.eval()


def as_torch(windows):
    return [tuple(map(torch.tensor, window)) for window in windows]


def gradients(model, loss):
    """{name: gradient} of the parameters that the loss reaches."""
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@examples(12)
@given(
    recurrent=st.booleans(), layers=st.integers(1, 3), insertion=st.integers(1, 3), module_layers=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_it_is_the_reference(recurrent, layers, insertion, module_layers, seed):
    """Losses and all gradients, of answering over three windows and of the pretraining."""
    sizes = {"recurrent": recurrent, "layers": layers, "insertion_layer": min(insertion, layers), "module_layers": module_layers}
    config, rng = dataclasses.replace(CONFIG, **sizes), np.random.default_rng(seed)
    params, (windows, answer) = shaken(config, rng), example(config, rng)
    model = model_with(params, config)
    expected, grads = ref.loss_and_gradients(params, config, windows, answer)
    loss = model.answer_loss(as_torch(windows), Answer(*map(torch.tensor, answer)))
    found = gradients(model, loss)
    zeros = {name: 0 * params[name] for name in params if name in grads and name not in found}
    assert not any(grads[name].any() for name in zeros)
    assert_agree({"loss": expected} | {n: grads[n] for n in found}, {"loss": loss} | found, 1e-9)
    targets, scored = rng.integers(config.vocabulary, size=(3, config.segment)), rng.random((3, config.segment)) < 0.5
    scored[0, 0] = True
    expected, grads = ref.masked_loss_and_gradients(params, config, windows[0][0], targets, scored)
    loss = model.masked_loss(*map(torch.tensor, (windows[0][0], targets, scored)))
    found = gradients(model, loss)
    assert_agree({"loss": expected} | {n: grads[n] for n in found}, {"loss": loss} | found, 1e-9)
    assert {name for name, grad in grads.items() if grad.any()} <= found.keys()


def test_states_and_outputs_are_the_references():
    rng = np.random.default_rng(1)
    params, (windows, _) = shaken(CONFIG, rng), example(CONFIG, rng)
    model, state = model_with(params, CONFIG), ref.initial_state(params, CONFIG, 3)
    own = model.initial_state(3)
    for window, other in zip(windows, as_torch(windows), strict=True):
        expected, state, _ = ref.forward(params, CONFIG, *window[:2], state)
        x, own = model(*other[:2], own)
        assert_agree(
            {"x": expected} | state._asdict(), {"x": x.detach()} | {n: f.detach() for n, f in own._asdict().items()}, 1e-9
        )


@pytest.mark.parametrize("length", [1, 5])
def test_a_window_may_be_shorter_and_the_only_one(length):
    rng = np.random.default_rng(1)
    params = shaken(CONFIG, rng)
    model = model_with(params, CONFIG)
    tokens, readable = rng.integers(CONFIG.vocabulary, size=(2, length)), np.ones((2, length), bool)
    assert not any(field.any() for field in model.initial_state(2))
    expected, state, _ = ref.forward(params, CONFIG, tokens, readable, ref.initial_state(params, CONFIG, 2))
    window = (torch.tensor(tokens), torch.tensor(readable))
    x, own = model(*window, model.initial_state(2))
    assert_agree({"x": expected} | state._asdict(), {"x": x.detach()} | {n: f.detach() for n, f in own._asdict().items()}, 1e-9)
    spans, kinds = model.read([(*window, window[1])])
    assert spans.shape == (2, 2, length) and kinds.shape == (2, 3)


def test_a_seed_gives_the_references_weights():
    params = ref.init_params(CONFIG, np.random.default_rng(7))
    for name, value in Roberta(CONFIG, seed=7).state_dict().items():
        assert torch.equal(value, torch.tensor(params[name])), name


def test_dropout_acts_in_training_alone():
    config, rng = dataclasses.replace(CONFIG, dropout=0.4), np.random.default_rng(2)
    windows, answer = example(config, rng)
    model, given = model_with(shaken(config, rng), config), (as_torch(windows), Answer(*map(torch.tensor, answer)))
    with torch.no_grad():
        assert model.answer_loss(*given) == model.answer_loss(*given)
        assert model.train().answer_loss(*given) != model.answer_loss(*given)


def test_the_embedding_has_dropout(monkeypatch):
    model = Roberta(dataclasses.replace(CONFIG, dropout=0.4))
    for layer in model.layers:
        monkeypatch.setattr(layer, "forward", lambda x, hidden, inserted: x)
    tokens = torch.arange(88).reshape(11, 8) % CONFIG.vocabulary
    given = (tokens, torch.ones(11, 8, dtype=torch.bool), model.initial_state(11))
    plain, dropped = model.eval()(*given)[0], model.train()(*given)[0]
    kept = dropped != 0
    assert 0.5 < kept.double().mean() < 0.7 and torch.allclose(dropped[kept], plain[kept] / 0.6)


def test_a_wrong_window_or_state_is_refused():
    model = Roberta(CONFIG)
    with pytest.raises(ValueError, match="a window of 9 tokens; it must have 1 to 8"):
        model(torch.zeros(1, 9, dtype=int), torch.ones(1, 9, dtype=bool), model.initial_state(1))
    with pytest.raises(ValueError, match="2 lanes, expected 1"):
        model(torch.zeros(1, 8, dtype=int), torch.ones(1, 8, dtype=bool), model.initial_state(2))


# RoBERTa's published file


@pytest.fixture
def published(tmp_path):
    """(transformers' masked-LM RoBERTa with random weights, the file that it writes, our Config of its sizes)."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers, to compare with")
    pytest.importorskip("safetensors", reason="needs the extra gpt2: safetensors")
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    sizes = transformers.RobertaConfig(
        vocab_size=40, hidden_size=12, num_hidden_layers=3, num_attention_heads=3, intermediate_size=20,
        max_position_embeddings=18, type_vocab_size=1, initializer_range=0.3, layer_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.RobertaForMaskedLM(sizes).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias" in name or "LayerNorm" in name or "layer_norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    config = ref.Config(vocabulary=40, width=12, layers=3, heads=3, feed_forward=20, segment=16, module_width=5, dropout=0.0)
    return theirs, tmp_path / "model.safetensors", config


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_published_file_gives_transformers_outputs(published, recurrent):
    """A first window's: with recurrence too, because nothing is inserted. Padding stands behind the text."""
    theirs, path, config = published
    model = Roberta(dataclasses.replace(config, recurrent=recurrent)).eval()
    load_published(model, path)
    tokens = torch.randint(2, 40, (2, 16))
    readable = torch.ones(2, 16, dtype=torch.bool)
    tokens[1, 11:], readable[1, 11:] = 1, False  # 1 is RoBERTa's padding
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), output_hidden_states=True)
        x, _ = model(tokens, readable, model.initial_state(2))
        logits = model.masked(x, model.embedding)
    rows = {"outputs": expected.hidden_states[-1][readable], "logits": expected.logits[readable]}
    assert_agree(rows, {"outputs": x[readable], "logits": logits[readable]}, 1e-5)


def test_shorter_windows_take_the_first_positions(published):
    _, path, config = published
    models = [Roberta(dataclasses.replace(config, segment=segment)) for segment in (16, 10)]
    for model in models:
        load_published(model, path)
    assert torch.equal(models[0].positions[:10], models[1].positions)


def test_a_file_of_the_encoder_alone_is_enough(published, tmp_path):
    theirs, _, config = published
    theirs.roberta.save_pretrained(tmp_path / "encoder")
    model = Roberta(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_published(model, tmp_path / "encoder" / "model.safetensors")
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.split(".")[0] not in ("masked", "answer", "module")}


def test_another_file_is_refused(published, tmp_path):
    _, path, config = published
    with pytest.raises(InputError, match="cannot be read as a safetensors file"):
        load_published(Roberta(config), tmp_path / "nothing")
    with pytest.raises(InputError, match=r"word_embeddings.weight is \(40, 12\), expected \(41, 12\); give weights"):
        load_published(Roberta(dataclasses.replace(config, vocabulary=41)), path)
    with pytest.raises(InputError, match=r"has no encoder.layer.3.attention.self.query.weight"):
        load_published(Roberta(dataclasses.replace(config, layers=4)), path)
