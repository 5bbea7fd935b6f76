"""The agent: V-trace is the paper's sum, losses are those of definitions, what acts learns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import agent, matching
from accelerated.lab.systems.agent import ACTIONS, OUTPUTS

cores = pytest.mark.parametrize("row", agent.ROWS)


def equation_1(behaviour, target, rewards, discounts, values):
    """v_s of one lane as Espeholt et al. write it, and what grad log pi is multiplied by.

    v_s is a sum over t of products over i.
    """
    ratio = np.minimum(1, np.exp(target - behaviour))
    following = [*values[1:], 0]
    targets = []
    for s in range(len(values)):
        total = values[s]
        for t in range(s, len(values)):
            delta = ratio[t] * (rewards[t] + discounts[t] * following[t] - values[t])
            total += np.prod([discounts[i] * ratio[i] for i in range(s, t)]) * delta
        targets.append(total)
    following = np.array([*targets[1:], 0])
    return np.array(targets), ratio * (rewards + discounts * following - values)


def objective_of_lane(logits, actions, log_probs, rewards, weight):
    """The sum over the steps of a lane, logits (T, OUTPUTS), that section 4.2 minimises."""
    steps = len(actions)
    log_policy = logits[:, :ACTIONS].log_softmax(-1)
    values = logits[:, ACTIONS]
    target = log_policy[range(steps), actions]
    discounts = 0.7 * (np.arange(steps) < steps - 1)
    wanted, advantages = equation_1(
        log_probs, target.detach().numpy(), rewards, discounts, values.detach().numpy()
    )
    entropy = -(log_policy.exp() * log_policy).sum(1)
    policy = -target * torch.tensor(advantages)
    value = 0.5 * (torch.tensor(wanted) - values) ** 2
    return (policy + value - weight * entropy).sum()


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

    expected = 0.0
    for lane, steps in enumerate(acted.sum(1)):
        own = [array[lane, :steps] for array in (logits, actions, log_probs, rewards)]
        expected += objective_of_lane(*own, weight) / acted.sum()
    tokens = actions  # which nothing reads
    fields = (tokens, actions, log_probs, rewards, acted)
    found = agent.objective(logits, agent.Rollout(*map(torch.tensor, fields)), 0.7, weight)
    assert torch.isclose(found, expected, atol=1e-12)
    [wanted] = torch.autograd.grad(expected, [logits])
    [gradient] = torch.autograd.grad(found, [logits])
    assert torch.allclose(gradient, wanted, atol=1e-12)


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


@pytest.fixture
def watched(monkeypatch):
    """The rollouts that training plays, and the halls of their episodes."""
    play = agent.play
    seen = SimpleNamespace(rollouts=[], halls=[])

    def noted(core, lanes, hall, *draws):
        seen.halls.append(hall)
        seen.rollouts.append(play(core, lanes, hall, *draws))
        return seen.rollouts[-1]

    monkeypatch.setattr(agent, "play", noted)
    return seen


def test_an_update_is_adams_of_the_objective_and_the_auxiliary_loss(watched, monkeypatch):
    """Of one rollout behind: actors have played the next one already.

    Nothing is left of the gradient before; it is clipped as the settings say; a seed gives the same
    agent again.
    """
    settings = agent.SETTINGS | {"lanes": 3, "updates": 3, "clip": 0.5, "hall": 2 / 3}
    clip = agent.average_and_clip
    updates = []

    def checked(model, iterations, limit):
        assert (iterations, limit) == (1, 0.5)
        assert len(watched.rollouts) == len(updates) + 2
        rollout = watched.rollouts[len(updates)]
        logits, auxiliary = agent.read_episode(model, rollout.tokens)
        loss = agent.objective(logits, rollout, settings["discount"], settings["entropy"])
        wanted = torch.autograd.grad(loss + auxiliary, [*model.parameters()])
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*wanted])
        norm = clip(model, iterations, limit)
        updates.append((model.embedding.detach().clone(), model.embedding.grad.clone()))
        return norm

    with monkeypatch.context() as patch:
        patch.setattr(agent, "average_and_clip", checked)
        successes = agent.train(agent.make_core("rate-4", 0), 0, settings, "")
    assert watched.halls == [0, 6, 12, 12], "of 13 lengths, in two updates of three"
    rewarded = [(rollout.rewards > 0).any(1).double() for rollout in watched.rollouts[:3]]
    assert successes == pytest.approx([each.mean().item() for each in rewarded])
    (before, grad), (after, _), _ = updates
    step = settings["learning_rate"] * grad / (grad.abs() + 1e-8)
    torch.testing.assert_close(after, before - step)
    assert agent.train(agent.make_core("rate-4", 0), 0, settings, "") == successes
