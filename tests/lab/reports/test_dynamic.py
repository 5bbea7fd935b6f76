"""Dynamic evaluation equals manual scoring and training, segment by segment."""

import copy
import dataclasses
import math

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
from tests.helpers.comparison import assert_agree
from tests.helpers.texts import BYTES, MERGED, document_from
from tests.helpers.variants import PAPERS, variant

RECURRENT, WINDOWED = PAPERS["block_recurrent"].small, PAPERS["pretrained_recurrence"].small
KINDS = {
    "block-recurrent": (BlockRecurrent, RECURRENT),
    "overlapping": (PretrainedRecurrence, WINDOWED),
    "plain": (PretrainedRecurrence, dataclasses.replace(WINDOWED, vectors=0, overlap=0)),
    "compressive": (Compressive, variant("compressive", "conv-attention_reconstruction")),
}
RATE = 0.3


def model_of(kind, tokenizer=BYTES, **changes):
    model_class, config = KINDS[kind]
    return model_class(dataclasses.replace(config, vocabulary=len(tokenizer.token_bytes), **changes))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def windows_of(document, config):
    """Yield (tokens of a document's window, padded to a segment, {place in it: target} of what it scores)."""
    for window in cut(len(document.inputs) + 1, config.segment, overlap_of(config)):
        own = range(window.first - 1, window.stop)
        tokens = [int(token) for token in document.inputs[window.start : window.stop]]
        scored = {place - window.start: int(document.targets[place]) for place in own if document.scored[place]}
        yield [*tokens, *[0] * (config.segment - len(tokens))], scored


def step_by_hand(model, objective, clip):
    """One step of gradient descent; parameters that only an auxiliary loss trains are clipped separately."""
    model.zero_grad()
    objective.backward()
    apart = {id(p) for p in model.auxiliary_parameters()}
    for is_apart in (False, True):
        group = [p for p in model.parameters() if (id(p) in apart) is is_apart]
        torch.nn.utils.clip_grad_norm_(group, clip or math.inf)
    sgd(model).step()


def by_hand(model, documents, clip):
    """Return (summed -log p, right predictions): the longest document first, each window scored, then trained on."""
    model, total, right = model.eval(), 0.0, 0
    for document in sorted(documents, key=lambda document: -len(document.inputs)):
        state = model.initial_state(1)
        for number, (tokens, scored) in enumerate(windows_of(document, model.config)):
            state = type(state)(*(field.detach() for field in state)) if number else model.initial_state(1)
            logits, state, auxiliary = model(torch.tensor([tokens]), state)
            places, targets = [*scored], torch.tensor([*scored.values()], dtype=torch.long)
            losses = functional.cross_entropy(logits[0, places], targets, reduction="none")
            total += losses.sum().item()
            right += (logits[0, places].argmax(-1) == targets).sum().item()
            if scored:
                step_by_hand(model, losses.mean() + sum(auxiliary.values()), clip)
    return total, right


TEXT = "the theatre and the abbey\n\nthat he heard of a b a b\n"


def documents_of(tokenizer):
    """Documents of 0, 1, 2 and many tokens; one has unscored segments in its middle."""
    partly = [True] * 14 + [False] * 30 + [True] * 14
    return [document_from(text, tokenizer) for text in (TEXT, "", "a", "he")] + [document_from(TEXT[3:], tokenizer, partly)]


@pytest.mark.parametrize("tokenizer, clip", [(BYTES, 0.0), (MERGED, 0.2)], ids=["bytes", "merged, clipped"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_lane_is_scored_and_trained_as_by_hand(kind, tokenizer, clip):
    model, documents = model_of(kind, tokenizer), documents_of(tokenizer)
    own = copy.deepcopy(model)
    score = evaluate_dynamically(model, documents, tokenizer, 1, sgd(model), clip)
    nats, right = by_hand(own, documents, clip)
    assert score.nats == pytest.approx(nats, rel=1e-10) and score.right == right
    assert score[1::2] == evaluate(model, documents, tokenizer, 1)[1::2], "tokens and bytes"
    assert_agree(dict(own.named_parameters()), dict(model.named_parameters()), 1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_the_mode_is_restored_and_old_gradients_are_dropped(training):
    model, documents = model_of("block-recurrent", dropout=0.5).train(training), [document_from(TEXT, BYTES)]
    expected = evaluate_dynamically(fresh := copy.deepcopy(model), documents, BYTES, 2, sgd(fresh))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    assert evaluate_dynamically(model, documents, BYTES, 2, sgd(model)) == expected
    assert model.training is training and all(parameter.grad is None for parameter in model.parameters())
