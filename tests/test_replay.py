"""Full BPTT, checkpointing and memory replay give the same loss, gradients and next state."""

import dataclasses
import itertools
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from accelerated import replay
from accelerated.lab.speed.timing import peak_memory
from tests.helpers.rollouts import (
    back_propagated,
    both_sides,
    check_back_propagation,
    random_rows,
    setting,
    torch_segments,
)
from tests.helpers.variants import (
    MORE_KINDS,
    PAPERS,
    over,
)

SMALL = PAPERS["block_recurrent"].small


def rollout(paper, config, count):
    """`count` segments of three lanes, of which all tokens are scored and no document starts."""
    rows = random_rows(config, np.random.default_rng(4), lanes=3, count=count)
    return torch_segments(paper, rows)


# start_here/test_mrbp.py draws all variants, lanes and numbers of segments, without dropout
@over(MORE_KINDS)
def test_the_three_methods_agree(paper, name):
    """With dropout and tasks; not all tokens are scored, and a document begins in the second."""
    check_back_propagation(*setting(paper, name))


# What is kept


def test_memory_replay_takes_the_memory_of_one_segment():
    """From 2 to 6 segments its peak grows by stored states; that of BPTT by 4 graphs."""
    sizes = {"lanes": 3, "encoder_layers": 0, "decoder_layers": 1}
    *_, model, state = both_sides("memformer", "decoder-only", **sizes)
    segments = rollout("memformer", model.config, 6)
    peaks = {}
    replay.through_time(model, segments[:1], state)  # allocates the gradients
    measured = [*itertools.product(("memory_replay", "through_time"), (2, 6)), ("checkpointed", 6)]
    for name, horizon in measured:
        run = partial(replay.BACKPROP[name], model, segments[:horizon], state)
        peaks[name, horizon] = peak_memory(run, torch.device("cpu"))
    stored = 4 * sum(field.numel() * field.element_size() for field in state)
    generator = torch.get_rng_state().numel()  # bytes, not small at these sizes
    assert peaks["memory_replay", 6] <= 1.01 * peaks["memory_replay", 2] + stored + generator
    # 6 / 2 graphs, less what does not depend on them
    assert peaks["through_time", 6] > 2.7 * peaks["through_time", 2]
    assert peaks["memory_replay", 6] < peaks["checkpointed", 6] < 0.5 * peaks["through_time", 6]


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_no_gradient_leaves_the_rollout_through_its_first_state(method):
    """A learned initial state gets gradient only from lanes that start inside the rollout."""
    model = PAPERS["block_recurrent"].model(SMALL)
    segments = rollout("block_recurrent", SMALL, 2)

    def gradient_of_the_start():
        rows = back_propagated(method, model, segments, model.initial_state(3))
        return rows["layers.1.state.initial"]

    assert not gradient_of_the_start().any(), "no lane starts inside the rollout"
    segments[1].starts[2] = True
    assert gradient_of_the_start().any(), "lane 2 starts inside the rollout"


# Random numbers


def test_every_segment_draws_from_its_own_seed():
    seeds = replay.segment_seeds([None] * 50) + replay.segment_seeds([None] * 50)
    assert len(set(seeds)) == len(seeds), "two segments draw alike: segment_seeds"


@pytest.mark.parametrize("kind", ["cpu", "cuda", "meta"])
def test_seeding_restores_the_generators_that_it_uses(kind, monkeypatch):
    """A GPU's if the model is on one; fork_rng always restores the CPU's."""
    device = torch.device(kind)
    fork_rng = MagicMock()
    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    with replay.seeded(0, device):
        [devices] = fork_rng.call_args.args
    assert devices == ([device] if kind == "cuda" else []), "which generators seeded restores"


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_methods_take_only_seeds_from_the_global_generator(method):
    """Its state is the same in all processes, so that one saved state restores all.

    Their dropout differs.
    """
    config = dataclasses.replace(SMALL, dropout=0.3)
    model = PAPERS["block_recurrent"].model(config).train()
    segments = rollout("block_recurrent", SMALL, 3)
    torch.manual_seed(5)
    replay.segment_seeds(segments)
    expected = torch.get_rng_state()

    def loss_of(rank):
        torch.manual_seed(5)
        loss, *_ = replay.BACKPROP[method](model, segments, model.initial_state(3), rank=rank)
        assert torch.equal(torch.get_rng_state(), expected), f"process {rank} drew other numbers"
        return loss

    assert loss_of(0) != loss_of(1), "two processes drop the same"
    assert loss_of(1) == loss_of(1), "a process drops something else if it is run again"
