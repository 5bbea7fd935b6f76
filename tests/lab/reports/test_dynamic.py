"""Dynamic evaluation equals manual scoring and training, segment by segment."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from accelerated.evaluation.score import evaluate
from accelerated.lab.reports.dynamic import evaluate_dynamically
from accelerated.training.optimization import average_and_clip
from tests.helpers.comparison import assert_agree
from tests.helpers.reading import read_alone
from tests.helpers.texts import BYTES, MERGED, document_from
from tests.helpers.variants import PAPERS, variant

KINDS = {
    "block_recurrent": PAPERS["block_recurrent"].small,
    "pretrained_recurrence": PAPERS["pretrained_recurrence"].small,  # its windows overlap
    "compressive": variant("compressive", "conv-attention_reconstruction"),
}
RATE = 0.3


def model_of(kind, tokenizer=BYTES, **changes):
    vocabulary = len(tokenizer.token_bytes)
    config = dataclasses.replace(KINDS[kind], vocabulary=vocabulary, **changes)
    return PAPERS[kind].model(config)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def by_hand(model, documents, clip):
    """(summed -log p, right predictions) of documents, the longest one first.

    Each window is scored, then trained on.
    """
    model.eval()
    total = 0.0
    right = 0
    for document in sorted(documents, key=lambda document: -len(document.inputs)):
        for window, logits, auxiliary in read_alone(model, document.inputs[None]):
            places = np.arange(window.first - 1, window.stop)
            scored = places[document.scored[places]]
            logits = logits[0, scored - window.start]
            targets = torch.tensor(document.targets[scored]).long()
            losses = functional.cross_entropy(logits, targets, reduction="none")
            total += losses.sum().item()
            right += (logits.argmax(-1) == targets).sum().item()
            if len(scored):
                model.zero_grad()
                (losses.mean() + sum(auxiliary.values())).backward()
                average_and_clip(model, 1, clip)
                sgd(model).step()
    return total, right


TEXT = "the theatre and the abbey\n\nthat he heard of a b a b\n"


def documents_of(tokenizer):
    """Documents of 0, 1, 2 and many tokens; one has unscored segments in its middle."""
    partly = [True] * 14 + [False] * 30 + [True] * 14
    whole = [document_from(text, tokenizer) for text in (TEXT, "", "a", "he")]
    return [*whole, document_from(TEXT[3:], tokenizer, partly)]


@pytest.mark.parametrize("tokenizer, clip", [(BYTES, 0.0), (MERGED, 0.2)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_lane_is_scored_and_trained_as_by_hand(kind, tokenizer, clip):
    model = model_of(kind, tokenizer)
    documents = documents_of(tokenizer)
    own = copy.deepcopy(model)
    score = evaluate_dynamically(model, documents, tokenizer, 1, sgd(model), clip)
    nats, right = by_hand(own, documents, clip)
    assert score.nats == pytest.approx(nats, rel=1e-10), "it is not trained segment by segment"
    assert score.right == right
    static = evaluate(model, documents, tokenizer, 1)
    assert score.tokens == static.tokens
    assert score.text_bytes == static.text_bytes
    assert_agree(dict(own.named_parameters()), dict(model.named_parameters()), 1e-9)


def test_dropout_is_off_the_mode_is_restored_and_old_gradients_are_dropped():
    model = model_of("block_recurrent", dropout=0.5).train()
    documents = [document_from(TEXT, BYTES)]
    fresh = copy.deepcopy(model)
    expected = evaluate_dynamically(fresh, documents, BYTES, 2, sgd(fresh))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    assert evaluate_dynamically(model, documents, BYTES, 2, sgd(model)) == expected
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, f"the report leaves a gradient on {name}"
