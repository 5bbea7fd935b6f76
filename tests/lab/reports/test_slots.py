"""eval.py slots: shares are those that are computed by hand, segment by segment."""

import dataclasses

import numpy as np
import pytest
import torch

from accelerated.data.windows import Document
from accelerated.lab.reports import slots
from accelerated.memformer import Writer
from tests.helpers.programs import refusal
from tests.helpers.variants import PAPERS

kinds = pytest.mark.parametrize("kind", ["encoder-decoder", "decoder-only"])


def documents(*lengths):
    """Documents of tokens 0 .. 3; 4 is never read."""
    found = []
    for number, length in enumerate(lengths):
        text = np.random.default_rng(number).integers(4, size=length + 1)
        found.append(Document("x", text[:-1], text[1:], np.ones(length, bool)))
    return found


def model_of(kind):
    """A model for segments of four tokens."""
    paper = PAPERS["memformer"]
    return paper.random_model(dataclasses.replace(paper.variant(kind), vocabulary=5, segment=4))


@kinds
def test_what_is_kept_and_read_is_the_writers_attention(kind, monkeypatch):
    model = model_of(kind)
    texts = documents(12, 9)
    monkeypatch.setattr(slots, "OFTEN", 1)
    kept, weight = slots.writing(model, texts, lanes=2)
    shares = []
    on_token = torch.zeros(5)
    count = torch.zeros(5)
    weights = []  # of each writer, (1, H, S, 1 + N)

    def watch(writer, given, _):
        memory, encoded, *_ = given
        weights.append(writer.weights(memory, writer.norm(encoded)).detach())

    for module in model.modules():
        if isinstance(module, Writer):
            module.register_forward_hook(watch)
    for text in texts:
        state = model.initial_state(1)
        for start in range(0, len(text.inputs) - 3, 4):  # whole segments
            tokens = torch.as_tensor(text.inputs[start : start + 4])[None]
            read = state.previous[0] if kind == "encoder-decoder" else tokens[0]
            weights.clear()
            state = model.advance(tokens, state)
            if start:
                found = torch.cat(weights)  # (L, H, S, 1 + N)
                shares.append(found[..., 0].mean(2))
                on_token.index_add_(0, read, found[..., 1:].mean((0, 1, 2)))
                count.index_add_(0, read, torch.ones(4))
    np.testing.assert_allclose(kept, torch.stack(shares).mean(0), rtol=1e-6)
    expected = on_token[:4] / count[:4] / (on_token.sum() / count.sum())
    np.testing.assert_allclose(weight, [*expected, 0.0], rtol=1e-6)


def test_documents_that_are_too_short_are_refused():
    error = refusal(slots.writing, model_of("encoder-decoder"), documents(4), 1)
    assert "no document has two segments" in error
