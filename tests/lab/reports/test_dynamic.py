"""Dynamic evaluation equals manual scoring and training, segment by segment."""

import copy
import dataclasses

import pytest
import torch
from torch.nn import functional

from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.data.windows import cut
from accelerated.evaluation.score import evaluate
from accelerated.lab.reports.dynamic import evaluate_dynamically
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.protocol import overlap_of
from accelerated.training.optimization import average_and_clip
from tests.helpers.comparison import assert_agree
from tests.helpers.texts import BYTES, MERGED, document_from
from tests.helpers.variants import PAPERS, variant

WINDOWED = PAPERS["pretrained_recurrence"].small
KINDS = {
    "block-recurrent": (BlockRecurrent, PAPERS["block_recurrent"].small),
    "overlapping": (PretrainedRecurrence, WINDOWED),
    "compressive": (Compressive, variant("compressive", "conv-attention_reconstruction")),
}
RATE = 0.3


def model_of(kind, tokenizer=BYTES, **changes):
    model_class, config = KINDS[kind]
    return model_class(
        dataclasses.replace(config, vocabulary=len(tokenizer.token_bytes), **changes)
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def by_hand(model, documents, clip):
    """Return (summed -log p, right predictions): the longest document first, each window scored, then trained on."""
    model, segment, total, right = model.eval(), model.config.segment, 0.0, 0
    for document in sorted(documents, key=lambda document: -len(document.inputs)):
        state = model.initial_state(1)
        for window in cut(len(document.inputs) + 1, segment, overlap_of(model.config)):
            state = (
                type(state)(*(field.detach() for field in state))
                if window.start
                else model.initial_state(1)
            )
            tokens = torch.tensor(
                [int(token) for token in document.inputs[window.start : window.stop]]
            )
            logits, state, auxiliary = model(
                functional.pad(tokens, (0, segment - len(tokens)))[None], state
            )
            scored = [
                place for place in range(window.first - 1, window.stop) if document.scored[place]
            ]
            logits, targets = (
                logits[0, [place - window.start for place in scored]],
                torch.tensor(document.targets[scored]).long(),
            )
            losses = functional.cross_entropy(logits, targets, reduction="none")
            total += losses.sum().item()
            right += (logits.argmax(-1) == targets).sum().item()
            if scored:
                model.zero_grad()
                (losses.mean() + sum(auxiliary.values())).backward()
                average_and_clip(model, 1, clip)
                sgd(model).step()
    return total, right


TEXT = "the theatre and the abbey\n\nthat he heard of a b a b\n"


def documents_of(tokenizer):
    """Documents of 0, 1, 2 and many tokens; one has unscored segments in its middle."""
    partly = [True] * 14 + [False] * 30 + [True] * 14
    return [document_from(text, tokenizer) for text in (TEXT, "", "a", "he")] + [
        document_from(TEXT[3:], tokenizer, partly)
    ]


@pytest.mark.parametrize(
    "tokenizer, clip", [(BYTES, 0.0), (MERGED, 0.2)], ids=["bytes", "merged, clipped"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_lane_is_scored_and_trained_as_by_hand(kind, tokenizer, clip):
    model, documents = model_of(kind, tokenizer), documents_of(tokenizer)
    own = copy.deepcopy(model)
    score = evaluate_dynamically(model, documents, tokenizer, 1, sgd(model), clip)
    nats, right = by_hand(own, documents, clip)
    assert score.nats == pytest.approx(nats, rel=1e-10) and score.right == right
    assert score[1::2] == evaluate(model, documents, tokenizer, 1)[1::2], "tokens and bytes"
    assert_agree(dict(own.named_parameters()), dict(model.named_parameters()), 1e-9)


def test_dropout_is_off_the_mode_is_restored_and_old_gradients_are_dropped():
    model, documents = (
        model_of("block-recurrent", dropout=0.5).train(),
        [document_from(TEXT, BYTES)],
    )
    expected = evaluate_dynamically(fresh := copy.deepcopy(model), documents, BYTES, 2, sgd(fresh))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    assert evaluate_dynamically(model, documents, BYTES, 2, sgd(model)) == expected
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
