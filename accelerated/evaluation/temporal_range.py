"""The loss by how many segments the memory has carried."""

import torch

from accelerated.data.lanes import one_pass
from accelerated.data.windows import overlap_of
from accelerated.evaluation.score import EMPTY, add_scores, evaluating, score_segment
from accelerated.protocol import keep_lanes, replace_lanes


def temporal_range(model, documents, tokenizer, lanes, reach):
    """A Score for each number of segments, 0 .. reach - 1, that the state has carried since it was the initial one.

    The state, all of it, is cleared before every reach-th segment of a document. A document's first `reach` segments are read and
    not scored, so that all numbers are of text from the middle of documents; each is of other segments than the others.
    """
    with evaluating(model, tokenizer) as (device, token_bytes):
        state, scores = model.initial_state(lanes), [EMPTY] * reach
        place = torch.zeros(lanes, dtype=torch.long, device=device)  # of the segment in its document
        for segment, kept in one_pass(documents, lanes, model.config.segment, overlap_of(model.config)):
            segment, state = segment.to(device), keep_lanes(state, kept)
            place = torch.where(segment.starts, 0, place[kept] + 1)
            logits, state, _ = model(segment.tokens, replace_lanes(place % reach == 0, model.initial_state(len(place)), state))
            for carried in (place % reach)[place >= reach].unique().tolist():
                own = ((place >= reach) & (place % reach == carried))[:, None]
                part = score_segment(logits, segment._replace(scored=segment.scored & own), token_bytes)
                scores[carried] = add_scores(scores[carried], part)
    return scores
