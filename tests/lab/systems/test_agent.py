"""The agent: V-trace is the paper's sum, losses are those of definitions, what acts learns."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import agent, matching
from accelerated.lab.systems.agent import ACTIONS, OUTPUTS

cores = pytest.mark.parametrize("row", agent.ROWS)


def after(x):
    """x (T,) of the step after each, and 0 after the last."""
    return torch.cat([x[1:], torch.zeros(1)])


def objective_of_lane(logits, actions, log_probs, rewards, weight):
    """The sum over the steps of a lane, logits (T, OUTPUTS), that section 4.2 minimises.

    v_s is that of Espeholt et al., equation 1: a sum over t of products over i.
    """
    steps = range(len(actions))
    log_policy = logits[:, :ACTIONS].log_softmax(-1)
    target = log_policy[steps, actions]
    values = logits[:, ACTIONS]
    known = values.detach()
    ratio = (target.detach() - log_probs).exp().clamp(max=1)
    deltas = ratio * (rewards + 0.7 * after(known) - known)
    wanted = known.clone()
    for s in steps:
        for t in steps[s:]:
            wanted[s] += 0.7 ** (t - s) * ratio[s:t].prod() * deltas[t]
    advantages = ratio * (rewards + 0.7 * after(wanted) - known)
    entropy = -(log_policy.exp() * log_policy).sum(1)
    value = 0.5 * (wanted - values) ** 2
    return (value - target * advantages - weight * entropy).sum()


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 5.0]))
def test_the_objective_and_its_gradient_are_those_of_the_definition(seed, weight):
    """Section 4.2: rho (r + gamma v' - V) log pi, (v - V)^2 / 2 and the entropy.

    No gradient flows through rho and v. Lanes end at different steps.
    """
    rng = np.random.default_rng(seed)
    shape = (3, 5)
    acted = np.arange(5) < rng.integers(1, 6, 3)[:, None]
    actions = rng.integers(ACTIONS, size=shape)
    log_probs = np.log(rng.uniform(0.05, 0.9, shape))
    rewards = rng.normal(size=shape) * acted
    logits = torch.tensor(rng.normal(size=(*shape, OUTPUTS)), requires_grad=True)
    tokens = actions  # which nothing reads
    rollout = agent.Rollout(*map(torch.tensor, (tokens, actions, log_probs, rewards, acted)))

    expected = 0.0
    for lane, steps in enumerate(acted.sum(1)):
        own = [field[lane, :steps] for field in (logits, *rollout[1:4])]
        expected += objective_of_lane(*own, weight) / acted.sum()
    found = agent.objective(logits, rollout, 0.7, weight)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    [wanted] = torch.autograd.grad(expected, [logits])
    [gradient] = torch.autograd.grad(found, [logits])
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@cores
def test_a_core_begins_undecided_from_its_seed(row):
    first, same, other = (agent.make_core(row, seed).state_dict() for seed in (0, 0, 1))
    torch.testing.assert_close(first, same, rtol=0, atol=0)
    assert not torch.equal(first["embedding"], other["embedding"])
    core = agent.make_core(row, 0)
    logits, _ = agent.read_episode(core, torch.arange(OUTPUTS, OUTPUTS + 12)[None])
    assert not logits.any()
    if row.startswith("rate"):
        assert core.config.compression_rate == int(row.removeprefix("rate-"))


@cores
def test_what_is_learned_from_is_what_acted(row):
    """Reading an episode by segments gives the log-probabilities that it was played with."""
    core = agent.make_core(row, 1).double()
    drawn = np.random.default_rng(0).normal(size=(OUTPUTS, 32))
    with torch.no_grad():
        core.output_matrix()[:OUTPUTS] = torch.tensor(drawn)
    rollout = agent.play(core, 3, 7, np.random.default_rng(1), torch.Generator().manual_seed(1))
    logits, auxiliary = agent.read_episode(core, rollout.tokens)
    log_policy = logits[..., :ACTIONS].log_softmax(-1)
    log_probs = log_policy.gather(2, rollout.actions[..., None])[..., 0]
    assert (log_probs - rollout.log_probs).abs().max() < 1e-9
    assert rollout.log_probs.std() > 0.1
    assert row.startswith("rate") == bool(auxiliary > 0)


def test_a_rollout_is_whole_episodes():
    """The world gives its observations and rewards again for the same actions."""
    core = agent.make_core("memformer")
    rollout = agent.play(core, 40, 2, np.random.default_rng(4), torch.Generator().manual_seed(4))
    world = matching.begin(40, 2, np.random.default_rng(4))
    fields = [field.T.numpy() for field in rollout]
    for tokens, actions, _, rewards, acted in zip(*fields, strict=True):
        assert (tokens == OUTPUTS + matching.observe(world)).all()
        assert (acted == ~world.ended).all()
        world, expected = matching.act(world, actions)
        assert (rewards == expected).all()
    assert rollout.tokens.shape == (40, matching.LENGTH)
    assert {*rollout.actions.flatten().tolist()} == {*range(ACTIONS)}


def test_an_update_is_adams_of_the_objective_and_the_auxiliary_loss(monkeypatch):
    """Of one rollout behind: actors have played the next one already.

    Nothing is left of the gradient before; it is clipped as the settings say; a seed gives the same
    agent again.
    """
    settings = agent.SETTINGS | {"lanes": 3, "updates": 3, "clip": 0.5, "hall": 2 / 3}
    play = agent.play
    clip = agent.average_and_clip
    rollouts = []
    halls = []
    updates = []

    def noted(core, lanes, hall, *draws):
        halls.append(hall)
        rollouts.append(play(core, lanes, hall, *draws))
        return rollouts[-1]

    def checked(model, iterations, limit):
        assert (iterations, limit) == (1, 0.5)
        assert len(rollouts) == len(updates) + 2
        rollout = rollouts[len(updates)]
        logits, auxiliary = agent.read_episode(model, rollout.tokens)
        loss = agent.objective(logits, rollout, settings["discount"], settings["entropy"])
        wanted = torch.autograd.grad(loss + auxiliary, [*model.parameters()])
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*wanted])
        norm = clip(model, iterations, limit)
        updates.append((model.embedding.detach().clone(), model.embedding.grad.clone()))
        return norm

    with monkeypatch.context() as patch:
        patch.setattr(agent, "average_and_clip", checked)
        patch.setattr(agent, "play", noted)
        successes = agent.train(agent.make_core("rate-4", 0), 0, settings, "")
    assert halls == [0, 6, 12, 12], "of 13 lengths, in two updates of three"
    rewarded = [(rollout.rewards > 0).any(1).double() for rollout in rollouts[:3]]
    assert successes == pytest.approx([each.mean().item() for each in rewarded])
    (before, grad), (after, _), _ = updates
    step = settings["learning_rate"] * grad / (grad.abs() + 1e-8)
    torch.testing.assert_close(after, before - step)
    assert agent.train(agent.make_core("rate-4", 0), 0, settings, "") == successes
