"""Full BPTT, gradient checkpointing and memory replay (MRBP) give the same loss, gradients and next state."""

import contextlib
import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated import replay
from accelerated.lab.speed.timing import peak_memory
from accelerated.protocol import detach, keep_lanes
from tests.conftest import examples
from tests.helpers.comparison import LADDER, assert_agree
from tests.helpers.rollouts import (
    back_propagated,
    both_sides,
    check_back_propagation,
    gradients,
    in_lane_1,
    random_rows,
    random_segments,
    reference_gradients,
    setting,
    starting,
    torch_segments,
)
from tests.helpers.variants import (
    EVERY_VARIANT,
    MORE_KINDS,
    ONE_OF_EACH,
    PAPERS,
    over,
    variant,
)

SMALL = PAPERS["block_recurrent"].small


def rollout(paper, config, count):
    """`count` segments of three lanes, of which all tokens are scored and no document starts."""
    rows = random_rows(config, np.random.default_rng(4), lanes=3, count=count)
    return torch_segments(paper, rows, starting(count=count, lanes=3))


# The first of each list is the first example of every variant
@over(EVERY_VARIANT)
@examples(2)
@given(
    horizon=st.sampled_from([3, 1, 2, 4]),
    lanes=st.sampled_from([2, 1, 3]),
    scored=st.sampled_from([0.7, 0.0, 0.1, 1.0]),
    begins=st.sampled_from([0.3, 0.0, 1.0]),
    dropout=st.sampled_from([0.3, 0.0]),
    method=st.sampled_from(["memory_replay", "checkpointed"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_three_methods_agree(
    paper, name, horizon, lanes, scored, begins, dropout, method, seed
):
    """In all lanes, with any share of tokens scored and of documents that begin, with tasks if the model reads them."""
    config, rng, _, _, model, state = both_sides(paper, name, lanes, seed, dropout=dropout)
    segments = []
    for number in range(horizon):
        length = config.segment - (PAPERS[paper].shorter if number and number == horizon - 1 else 0)
        tokens, targets = rng.integers(config.vocabulary, size=(2, lanes, max(1, length)))
        reads = name in PAPERS[paper].tasks and (number + seed) % 2 == 0
        task = (
            (PAPERS[paper].random_task(config, rng, rng.integers(3, size=lanes)),) if reads else ()
        )
        segments.append((tokens, targets, rng.random(tokens.shape) < scored, *task))
    starts = [rng.random(lanes) < begins for _ in segments]
    check_back_propagation(model, torch_segments(paper, segments, starts), state, method)


@over([*MORE_KINDS, ("compressive", "conv-auto_encoding")])
def test_through_time_is_the_references_back_propagation(paper, name):
    """Without seeds, replay or autograd: loss, auxiliary losses, gradients and next state, with tasks and a document start."""
    config, rng, params, state, model, torch_state = both_sides(paper, name)
    segments = random_segments(paper, name, rng)
    starts = in_lane_1(segments)
    expected = reference_gradients(paper, params, config, segments, starts, state)
    assert_agree(
        expected,
        back_propagated(
            "through_time", model, torch_segments(paper, segments, starts), torch_state
        ),
        LADDER,
    )


# What is kept


def test_memory_replay_takes_the_memory_of_one_segment():
    """From 2 to 6 segments its peak grows by the stored states; that of BPTT by the graphs of 4 segments."""
    *_, model, state = both_sides("memformer", "encoder-decoder", lanes=3)
    segments = rollout("memformer", model.config, 6)
    peaks = {}
    for name, method in replay.BACKPROP.items():
        for horizon in (2, 6):
            method(model, segments[:1], state)  # allocates the gradients
            peaks[name, horizon] = peak_memory(
                partial(method, model, segments[:horizon], state), torch.device("cpu")
            )
    stored = 4 * sum(field.numel() * field.element_size() for field in state)
    generator = torch.get_rng_state().numel()  # bytes, not small at these sizes
    assert peaks["memory_replay", 6] <= 1.01 * peaks["memory_replay", 2] + stored + generator
    assert (
        peaks["through_time", 6] > 2.7 * peaks["through_time", 2]
    )  # 6 / 2 graphs, less what does not depend on them
    assert peaks["memory_replay", 6] < peaks["checkpointed", 6] < 0.5 * peaks["through_time", 6]


@over(ONE_OF_EACH)
def test_memory_replay_keeps_one_segments_graph(paper, name, monkeypatch):
    """First only `advance` without gradient; then no segment is read before the gradients of the last one are there."""
    model = PAPERS[paper].model(variant(paper, name))
    read, advance = model.read, model.advance
    advanced = []
    gradients_before = []

    def watched_advance(*given):
        advanced.append(torch.is_grad_enabled())
        return advance(*given)

    def watched_read(*given):
        gradient = model.embedding.grad
        gradients_before.append(0.0 if gradient is None else gradient.norm().item())
        return read(*given)

    monkeypatch.setattr(model, "advance", watched_advance)
    monkeypatch.setattr(model, "read", watched_read)
    replay.memory_replay(model, rollout(paper, model.config, 3), model.initial_state(3))
    assert advanced == [False, False]
    assert gradients_before[0] == 0 and len(set(gradients_before)) == 3


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_no_gradient_leaves_the_rollout_through_its_first_state(method):
    """A learned initial state gets gradient only from lanes that start inside the rollout."""
    model, name = PAPERS["block_recurrent"].model(SMALL), "layers.1.state.initial"
    segments = rollout("block_recurrent", SMALL, 2)
    assert not back_propagated(method, model, segments, model.initial_state(3))[name].any()
    segments[1].starts[2] = True
    assert back_propagated(method, model, segments, model.initial_state(3))[name].any()


@over(
    [
        ("block_recurrent", "fixed-skip"),
        ("compressive", "conv-attention_reconstruction"),
        ("memformer", "encoder-decoder"),
    ]
)
def test_bfloat16_trains(paper, name):
    """By each method; all is finite and close to float32, and what gets gradient there gets gradient here."""
    torch.set_default_dtype(torch.float32)
    model = PAPERS[paper].model(variant(paper, name))
    segments, state = rollout(paper, model.config, 3), detach(model.initial_state(3))
    segments[1].starts[1] = True
    names = [name for name, _ in model.named_parameters()]
    for method in replay.BACKPROP:
        exact, rough = (
            back_propagated(method, model, segments, state, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
        assert math.isclose(exact["loss"].item(), rough["loss"].item(), rel_tol=0.02)
        assert all(
            torch.isfinite(rough[n]).all() and rough[n].any() for n in names if exact[n].any()
        )
        flat = [torch.cat([rows[n].flatten() for n in names]) for rows in (exact, rough)]
        assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.98


def test_every_segment_draws_from_its_own_seed(monkeypatch):
    """100 segments, 100 seeds. Seeding restores a GPU's generator if the model is on one; fork_rng always restores the CPU's."""
    assert len({*replay.segment_seeds([None] * 50), *replay.segment_seeds([None] * 50)}) == 100
    asked = []
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda devices: asked.append(devices) or contextlib.nullcontext()
    )
    for device in map(torch.device, ("cpu", "cuda", "meta")):
        with replay.seeded(0, device):
            assert asked[-1] == ([device] if device.type == "cuda" else [])


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_methods_take_only_seeds_from_the_global_generator(method):
    """Whose state is the same in all processes, so that one saved state restores all; their dropout differs."""
    model, losses = (
        PAPERS["block_recurrent"].model(dataclasses.replace(SMALL, dropout=0.3)).train(),
        [],
    )
    segments = rollout("block_recurrent", SMALL, 3)
    torch.manual_seed(5)
    replay.segment_seeds(segments)
    expected = torch.get_rng_state()
    for rank in (0, 1, 1):
        torch.manual_seed(5)
        losses.append(
            replay.BACKPROP[method](model, segments, model.initial_state(3), rank=rank)[0]
        )
        assert torch.equal(torch.get_rng_state(), expected)
    assert losses[0] != losses[1] == losses[2]


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_groups_of_lanes_add_up_to_all_lanes(method):
    """`scored` is the divisor of all lanes, `share` weighs a group's auxiliary losses: gradients and losses sum."""
    model, segments, state = setting("compressive", "conv-attention_reconstruction", dropout=0.0)
    expected = back_propagated(method, model, segments, state)
    model.zero_grad()
    parts = []
    for lane in (slice(0, 1), slice(1, 2)):
        own = [segment.keep_lanes(lane) for segment in segments]
        loss, auxiliary, _ = replay.BACKPROP[method](
            model, own, keep_lanes(state, lane), replay.count_scored(segments), 0.5
        )
        parts.append(
            {"loss": loss[None]}
            | {f"auxiliary.{name}": value[None] for name, value in auxiliary.items()}
        )
    found = {name: sum(part[name] for part in parts) for name in parts[0]} | gradients(model)
    assert len(parts[0]) == 4, "the loss, and the compression's of three layers"
    assert_agree({name: expected[name] for name in found}, found, 1e-11)
