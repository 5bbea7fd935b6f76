"""eval.py slots: shares are those that are computed by hand, segment by segment."""

import dataclasses

import numpy as np
import pytest
import torch

from accelerated.data.windows import Document
from accelerated.lab.reports.slots import shares_kept
from accelerated.memformer import Writer
from tests.helpers.programs import refusal
from tests.helpers.variants import PAPERS

kinds = pytest.mark.parametrize("kind", ["encoder-decoder", "decoder-only"])


def documents(*lengths):
    """Documents of tokens 0 .. 3."""
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
def test_what_is_kept_and_read_is_the_writers_attention(kind):
    model = model_of(kind)
    texts = documents(12, 9)
    kept = shares_kept(model, texts, lanes=2)
    shares = []
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
            weights.clear()
            state = model.advance(torch.as_tensor(text.inputs[start : start + 4])[None], state)
            if start:
                shares.append(torch.cat(weights)[..., 0].mean(2))  # (L, H)
    torch.testing.assert_close(kept, torch.stack(shares).mean(0), rtol=1e-6, atol=0)


def test_documents_that_are_too_short_are_refused():
    error = refusal(shares_kept, model_of("encoder-decoder"), documents(4), 1)
    assert "no document has two segments" in error
