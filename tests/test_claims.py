"""Claims of the papers that no other test makes executable; tests/tools/trust.py lists all claims with their tests."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerated.protocol import require_gradient
from tests.helpers.rollouts import check_back_propagation, random_rows, starting, torch_segments
from tests.helpers.variants import PAPERS, variant


def test_states_that_start_alike_stay_alike_without_ids():
    """Block-Recurrent 3.3: the IDs let each state ask something else; without them S states are one."""
    own = PAPERS["block_recurrent"]
    config, rng = own.small, np.random.default_rng(2)
    params, tokens = own.random_params(config, rng), rng.integers(config.vocabulary, size=(1, 24))
    start, ids = "layers.1.state.initial", "layers.1.state.ids"
    params[start] = np.tile(params[start][:1], (config.states, 1))
    for given, alike in ((params | {ids: np.zeros_like(params[ids])}, True), (params, False)):
        state = own.reference.forward(
            given, config, tokens, own.reference.initial_state(given, config, 1)
        )[1]
        model = own.model_with(given, config)
        after = model(torch.tensor(tokens), model.initial_state(1)).state
        for states in (state.states[0, 0], after.states[0, 0].detach().numpy()):
            assert (np.abs(states - states[:1]).max() < 1e-12) == alike


@pytest.mark.parametrize("name,linear", [("fixed-skip", True), ("slide", True), ("xl", False)])
def test_a_blocks_cost_does_not_depend_on_the_segments_length(name, linear):
    """Block-Recurrent 3.1: blocks 2 to 4 take equal FLOPs. The counterexample, xl, is one window that grows with the segment."""
    own, flops = PAPERS["block_recurrent"], []
    for blocks in (1, 2, 4):
        config = dataclasses.replace(
            variant("block_recurrent", name), segment=4 * blocks, window=4 if linear else 4 * blocks
        )
        model, counter = own.model(config).eval(), FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(torch.zeros(1, 4 * blocks, dtype=torch.long), model.initial_state(1))
        flops.append(counter.get_total_flops())
    second_block, third_and_fourth = flops[1] - flops[0], flops[2] - flops[1]
    alike = (
        third_and_fourth == 2 * second_block and flops[0] < 1.1 * second_block
    )  # the first also makes the position biases
    assert alike == linear and third_and_fourth >= 2 * second_block


LATER = [  # (paper, changes, in how many of 12 segments, its own is one, the first segment's last token changes a logit)
    (
        "block_recurrent",
        {"layers": 2, "recurrent_layers": (), "segment": 4},
        3,
    ),  # Slide reaches back W tokens per layer
    (
        "block_recurrent",
        {"layers": 2, "recurrent_layers": (2,), "segment": 4},
        12,
    ),  # its states further
    ("compressive", {"layers": 1, "memory": 8, "compressed_memory": 0}, 2),
    # Its own, one in memory, three in compressed memory: a segment adds two rows of five, so its row is the 5th, 3rd, 1st, gone
    ("compressive", {"layers": 1, "memory": 8}, 5),
    ("memformer", {}, 12),
    ("memformer", {"encoder_layers": 0}, 12),
    ("memorizing", {"layers": 1, "memory_layer": 1, "memory": 0}, 2),  # by the cache
    ("memorizing", {"layers": 1, "memory_layer": 1, "memory": 4, "retrieved": 4}, 2),
    (
        "memorizing",
        {"layers": 1, "memory_layer": 1, "memory": 20, "retrieved": 20},
        6,
    ),  # by M / N segments of memory
    ("pretrained_recurrence", {"overlap": 0}, 12),
    ("pretrained_recurrence", {"overlap": 0, "vectors": 0}, 1),
]


@pytest.mark.parametrize(
    "paper,changes,count", LATER, ids=[f"{paper} {changes}" for paper, changes, _ in LATER]
)
def test_how_many_segments_later_a_token_still_counts(paper, changes, count):
    """After that, to the bit, it does not."""
    own, config, runs = PAPERS[paper], dataclasses.replace(PAPERS[paper].small, **changes), []
    model = own.random_model(config)
    segments = torch.randint(11, (12, 1, model.config.segment))
    other = segments.clone()
    other[0, 0, -1] = (other[0, 0, -1] + 1) % 11
    for document in (segments, other):
        state, logits = model.initial_state(1), []
        for tokens in document:
            output = model(tokens, state)
            state = output.state
            logits.append(output.logits)
        runs.append(logits)
    assert [not torch.equal(a, b) for a, b in zip(*runs, strict=True)] == [True] * count + [
        False
    ] * (12 - count)


@pytest.mark.parametrize(
    "paper,name,horizon",
    [("pretrained_recurrence", "overlapping", 20), ("memformer", "encoder-decoder", 32)],
)
def test_gradient_reaches_over_the_papers_horizon(paper, name, horizon):
    """From the last segment's logits into the state after the first; memory replay gives parameters the gradient of full BPTT."""
    own, config, rng = PAPERS[paper], variant(paper, name), np.random.default_rng(4)
    if paper == "memformer":
        config = dataclasses.replace(config, encoder_layers=1, decoder_layers=1)
    rows = [
        (read, targets, np.zeros_like(scored))
        for read, targets, scored in random_rows(config, rng, lanes=1, count=horizon)
    ]
    rows[-1][2][:] = True
    segments = torch_segments(paper, rows, starting(0, count=horizon, lanes=1))
    model = own.model_with(own.random_params(config, rng), config)
    check_back_propagation(model, segments, model.initial_state(1), "memory_replay")
    state = first = require_gradient(model.advance(segments[0].tokens, model.initial_state(1)))
    for segment in segments[1:-1]:
        state = model.advance(segment.tokens, state)
    model(segments[-1].tokens, state).logits.log_softmax(-1)[..., 0].sum().backward()
    assert first[0].grad.any(), "what carries gradient is the first field"
