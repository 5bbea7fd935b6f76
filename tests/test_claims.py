"""Claims of the papers that no other test makes executable; docs/trust.md lists all."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerated.protocol import require_gradient
from reference.gradients import fields_of
from tests.helpers.rollouts import both_sides, check_back_propagation, random_rows, torch_segments
from tests.helpers.variants import PAPERS, variant


def test_states_that_start_alike_stay_alike_without_ids():
    """Block-Recurrent 3.3: the IDs let each state ask something else; without, S states are one."""
    own = PAPERS["block_recurrent"]
    config, rng, params, *_ = both_sides("block_recurrent", "fixed-skip")
    tokens = rng.integers(config.vocabulary, size=(1, 24))
    start = "layers.1.state.initial"
    params[start] = np.tile(params[start][:1], (config.states, 1))
    ids = "layers.1.state.ids"
    without = params | {ids: np.zeros_like(params[ids])}
    for given, alike in ((without, True), (params, False)):
        state = own.reference.initial_state(given, config, 1)
        _, after, _ = own.reference.forward(given, config, tokens, state)
        states = after.states[0, 0]
        apart = np.abs(states - states[0]).max()
        assert (apart < 1e-12) == alike, f"{'without' if alike else 'with'} IDs: {apart} apart"


@pytest.mark.parametrize("name,linear", [("fixed-skip", True), ("slide", True), ("xl", False)])
def test_a_blocks_cost_does_not_depend_on_the_segments_length(name, linear):
    """Block-Recurrent 3.1: blocks 2 to 4 take equal FLOPs.

    The counterexample, xl, is one window that grows with the segment.
    """
    flops = {}
    for blocks in (1, 2, 4):
        tokens = 4 * blocks
        sizes = {"segment": tokens, "window": 4 if linear else tokens}
        config = dataclasses.replace(variant("block_recurrent", name), **sizes)
        model = PAPERS["block_recurrent"].model(config).eval()
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(torch.zeros(1, tokens, dtype=torch.long), model.initial_state(1))
        flops[blocks] = counter.get_total_flops()
    second = flops[2] - flops[1]
    third_and_fourth = flops[4] - flops[2]
    assert third_and_fourth >= 2 * second
    # The first block also makes the position biases
    alike = third_and_fourth == 2 * second and flops[1] < 1.1 * second
    assert alike == linear, f"blocks cost {flops}"


# A paper, in how many of 12 segments the first one's last token changes a logit, what is changed.
# Its own segment is one of them
LISTED = """
# Slide reaches back W tokens per layer, its states further
block_recurrent 3 {"layers": 2, "recurrent_layers": [], "segment": 4}
block_recurrent 12 {"layers": 2, "recurrent_layers": [2], "segment": 4}
compressive 2 {"layers": 1, "memory": 8, "compressed_memory": 0}
# Its own, one in memory, three in compressed memory: a segment adds two rows of five, so its
# row is the 5th, 3rd, 1st, gone
compressive 5 {"layers": 1, "memory": 8}
memformer 12 {}
memformer 12 {"encoder_layers": 0}
# By the cache, and by M / N segments of memory
memorizing 2 {"layers": 1, "memory_layer": 1, "memory": 0}
memorizing 2 {"layers": 1, "memory_layer": 1, "memory": 4, "retrieved": 4}
memorizing 6 {"layers": 1, "memory_layer": 1, "memory": 20, "retrieved": 20}
pretrained_recurrence 12 {"overlap": 0}
pretrained_recurrence 1 {"overlap": 0, "vectors": 0}
"""
LATER = [row.split(" ", 2) for row in LISTED.strip().splitlines() if row[0] != "#"]


@pytest.mark.parametrize("paper, count, changes", LATER)
@torch.no_grad()
def test_how_many_segments_later_a_token_still_counts(paper, count, changes):
    """After that, to the bit, it does not."""
    config = dataclasses.replace(PAPERS[paper].small, **fields_of(changes))
    model = PAPERS[paper].random_model(config)
    segments = torch.randint(11, (12, 1, model.config.segment))
    other = segments.clone()
    other[0, 0, -1] = (other[0, 0, -1] + 1) % 11
    state = model.initial_state(1)
    other_state = state
    counts = []
    for number in range(12):
        logits, state, _ = model(segments[number], state)
        other_logits, other_state, _ = model(other[number], other_state)
        if not torch.equal(logits, other_logits):
            counts.append(number)
    assert counts == [*range(int(count))], f"it counts in the segments {counts}"


@pytest.mark.parametrize(
    "paper,name,horizon",
    [("pretrained_recurrence", "overlapping", 20), ("memformer", "encoder-decoder", 32)],
)
def test_gradient_reaches_over_the_papers_horizon(paper, name, horizon):
    """From the last segment's logits into the state after the first.

    Memory replay gives parameters the gradient of full BPTT.
    """
    own = PAPERS[paper]
    config = variant(paper, name)
    if paper == "memformer":
        config = dataclasses.replace(config, encoder_layers=1, decoder_layers=1)
    rng = np.random.default_rng(4)
    rows = random_rows(config, rng, lanes=1, count=horizon, begins=[0])
    for row in rows[:-1]:
        row.scored[:] = False
    segments = torch_segments(paper, rows)
    model = own.model_with(own.random_params(config, rng), config)
    check_back_propagation(model, segments, model.initial_state(1), "memory_replay")

    first = require_gradient(model.advance(segments[0].tokens, model.initial_state(1)))
    state = first
    for segment in segments[1:-1]:
        state = model.advance(segment.tokens, state)
    model(segments[-1].tokens, state).logits.log_softmax(-1)[..., 0].sum().backward()
    gradient = first[0].grad  # the first field carries it
    assert gradient is not None and gradient.any(), f"none comes back over {horizon} segments"
