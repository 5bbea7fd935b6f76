"""Dynamic evaluation: a model goes on training on the text that it is scored on, each token scored before it is trained on."""

import torch

from accelerated.data.lanes import one_pass
from accelerated.data.windows import overlap_of
from accelerated.evaluation.score import EMPTY, add_scores, evaluating, score_segment
from accelerated.protocol import keep_lanes
from accelerated.replay import begin, through_time
from accelerated.training.optimization import prepare_gradients


def evaluate_dynamically(model, documents, tokenizer, lanes, optimizer, clip=0.0):
    """Read documents in `lanes` lanes, update the weights after every segment, and return the Score.

    "Continuing training over one epoch of the test set" (Compressive Transformers, section 5.3; Graves 2013; Krause et al. 2019).
    A segment is scored with the weights as they are, and only then takes one step of `optimizer` along the gradient of its mean
    loss and auxiliary losses, limited to the norm `clip` unless that is 0. The state that goes on is the one of the scoring.
    Dropout is off throughout. The model keeps the weights that it ends with: not those that it was given.
    """
    model.zero_grad()  # what was left there is of another text
    with evaluating(model, tokenizer) as (device, token_bytes):
        state, score = model.initial_state(lanes), EMPTY
        for segment, kept in one_pass(documents, lanes, model.config.segment, overlap_of(model.config)):
            segment, carried = segment.to(device), keep_lanes(state, kept)
            logits, state, _ = model(segment.tokens, begin(model, segment, carried))
            score = add_scores(score, score_segment(logits, segment, token_bytes))
            if segment.scored.any():
                update(model, segment, carried, optimizer, clip)
    return score


def update(model, segment, state, optimizer, clip):
    """One step of the optimiser on a segment read from `state`; no gradients are left."""
    torch.clear_autocast_cache()  # older torch would go on with weights that it cast without gradient
    with torch.enable_grad():
        through_time(model, [segment], state)
    prepare_gradients(model, 1, clip)
    optimizer.step()
    model.zero_grad()
    torch.clear_autocast_cache()  # its copies are of the weights before this step
