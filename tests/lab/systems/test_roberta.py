"""RoBERTa with recurrence in PyTorch: transformers' RoBERTa judges its windows and its layers."""

import pytest
import torch
from torch.nn import functional

from accelerated.lab.systems.roberta import Window, load_roberta
from tests.helpers.comparison import assert_agree

VOCABULARY = 301  # of the folder
# Of the example: span, no, span; the places of start and end among the tokens of all windows
KIND = torch.tensor([0, 2, 0])
PLACES = torch.tensor([[11, 13], [0, 0], [4, 14]])


def random_model(folder, seed, recurrent=True):
    """A model whose parameters are away from where they begin, so that every term has an effect."""
    model = load_roberta(folder, recurrent, 0)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in (*model.span.parameters(), *model.kind.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def example():
    """Three windows of three lanes; lane 0 has padding, and lane 2 ends before the others."""
    windows = []
    for k in range(3):
        readable = torch.ones(3, 8, dtype=torch.bool)
        readable[0, 6:] = False
        readable[2] = k < 2
        text = readable.clone()
        text[:, :3] = False
        windows.append(Window(torch.randint(VOCABULARY, (3, 8)), readable, text))
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
def test_a_window_knows_of_earlier_ones_through_the_vector_alone(folder, recurrent):
    """A lane's first window changes its second one's outputs if the model is recurrent.

    And no other lane's at all.
    """
    model = random_model(folder, 5, recurrent)
    first, *others = example()
    changed = first._replace(tokens=(first.tokens + torch.tensor([[1], [0], [0]])) % VOCABULARY)
    (_, second, *_), _ = outputs_of(model, [first, *others])
    (_, other, *_), _ = outputs_of(model, [changed, *others])
    difference = (second - other).abs().amax((1, 2))
    assert (difference[0] > 1e-6) == recurrent
    assert not difference[1:].any(), "another lane's window is read"


def test_the_state_is_the_mean_and_the_maximum_over_windows(folder):
    windows = example()
    outputs, state = outputs_of(random_model(folder, 6), windows)
    for lane in range(3):
        read = [k for k, window in enumerate(windows) if window.readable[lane, 0]]
        last = read[-1]
        mean = outputs[last][lane][windows[last].readable[lane]].mean(0)
        firsts = torch.stack([outputs[k][lane, 0] for k in read])
        torch.testing.assert_close(state.pooled[lane], mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(state.first[lane], firsts.amax(0))
    assert state.present.all()
    assert len(read) < len(windows), "the last lane's example ends before the others"


def test_an_answer_is_looked_for_in_all_of_the_text_and_nowhere_else(folder):
    """The loss: -log p of the kind, and half of the start's and the end's if it is a span."""
    model = random_model(folder, 8)
    windows = example()
    spans, kinds = model.read(windows)
    assert spans.shape == (3, 2, 3 * 8)
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


def both(folder, recurrent):
    """transformers' RoBERTa of a folder, and ours."""
    import transformers

    theirs = transformers.RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float64)
    return theirs.eval(), load_roberta(folder, recurrent, 0).eval()


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_first_window_is_that_of_transformers_roberta(folder, recurrent):
    """Of the folder that it saved, with recurrence too, because nothing is inserted.

    The windows may be shorter than its positions.
    """
    theirs, model = both(folder, recurrent)
    tokens = torch.randint(2, 40, (2, 14))
    readable = torch.ones(2, 14, dtype=torch.bool)
    tokens[1, 11:] = 1
    readable[1, 11:] = False
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), output_hidden_states=True)
        x, _ = model(tokens, readable, model.initial_state(2))
    assert_agree(expected.hidden_states[-1][readable], x[readable], 1e-9)


def test_a_later_window_is_transformers_with_a_token_more_at_one_layer(folder):
    """The vector stands before the second layer's input, and what comes out in its place is left.

    The network that makes the vector is GELU between matrices.
    """
    theirs, model = both(folder, True)
    state = model.initial_state(2)
    state = state._replace(pooled=torch.randn(2, 12), present=torch.tensor([True, True]))
    tokens = torch.randint(2, 40, (2, 14))
    first, second, last = (each for each in model.module if isinstance(each, torch.nn.Linear))
    with torch.no_grad():
        hidden = functional.gelu(second(functional.gelu(first(state.pooled))))
        vector = last(hidden)

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
    """The answer's head and the vector's network, of variance 1 / D (decision 3)."""
    first, second = (load_roberta(folder, True, seed).state_dict() for seed in (0, 1))
    drawn = {name for name, value in first.items() if not torch.equal(value, second[name])}
    network = {f"module.{number}.weight" for number in (0, 2, 4)}
    assert drawn == {"span.weight", "kind.weight", *network}
    for name in network:
        assert first[name].std() == pytest.approx(12**-0.5, rel=0.2)
