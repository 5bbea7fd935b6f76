"""The agent: V-trace is the paper's sum, losses and gradients are those of definitions, what acts is what learns."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import agent, matching
from accelerated.lab.systems.agent import ACTIONS, OUTPUTS

cores = pytest.mark.parametrize("row", agent.ROWS)


def equation_1(behaviour, target, rewards, discounts, values):
    """v_s of one lane as Espeholt et al. write it, a sum over t of products over i; and what grad log pi is multiplied by."""
    ratio, following, targets = np.minimum(1, np.exp(target - behaviour)), [*values[1:], 0], []
    for s in range(len(values)):
        total = values[s]
        for t in range(s, len(values)):
            delta = ratio[t] * (rewards[t] + discounts[t] * following[t] - values[t])
            total += np.prod([discounts[i] * ratio[i] for i in range(s, t)]) * delta
        targets.append(total)
    return np.array(targets), ratio * (rewards + discounts * np.array([*targets[1:], 0]) - values)


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 5.0]))
def test_the_objective_and_its_gradient_are_those_of_the_definition(seed, weight):
    """Section 4.2: rho (r + gamma v' - V) log pi, (v - V)^2 / 2 and the entropy, with no gradient through rho and v."""
    rng, steps = np.random.default_rng(seed), 5
    acted = (
        np.arange(steps) < rng.integers(1, steps + 1, 3)[:, None]
    )  # lanes end at different steps
    actions, log_probs = (
        rng.integers(ACTIONS, size=(3, steps)),
        np.log(rng.uniform(0.05, 0.9, (3, steps))),
    )
    rollout = agent.Rollout(
        *map(
            torch.tensor, (actions, actions, log_probs, rng.normal(size=(3, steps)) * acted, acted)
        )
    )
    logits = torch.tensor(rng.normal(size=(3, steps, OUTPUTS)), requires_grad=True)
    expected = 0.0
    for lane, length in enumerate(acted.sum(1)):
        log_policy, values = (
            logits[lane, :length, :ACTIONS].log_softmax(-1),
            logits[lane, :length, ACTIONS],
        )
        target = log_policy[range(length), actions[lane, :length]]
        rewards, discounts = (
            rollout.rewards[lane, :length].numpy(),
            0.7 * (np.arange(length) < length - 1),
        )
        given_ = (
            log_probs[lane, :length],
            target.detach().numpy(),
            rewards,
            discounts,
            values.detach().numpy(),
        )
        wanted, advantages = map(torch.tensor, equation_1(*given_))
        entropy = -(log_policy.exp() * log_policy).sum(1)
        expected += (
            -target * advantages + 0.5 * (wanted - values) ** 2 - weight * entropy
        ).sum() / acted.sum()
    ours = agent.objective(logits, rollout, 0.7, weight)
    [gradient], [found] = (
        torch.autograd.grad(expected, [logits]),
        torch.autograd.grad(ours, [logits]),
    )
    assert torch.isclose(ours, expected, atol=1e-12) and torch.allclose(found, gradient, atol=1e-12)


@cores
def test_a_core_begins_undecided_from_its_seed(row):
    first, same, other = (agent.make_core(row, seed) for seed in (0, 0, 1))
    assert not agent.read_episode(first, torch.arange(OUTPUTS, OUTPUTS + 12)[None])[0].any()
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True)
    )
    assert not torch.equal(first.embedding, other.embedding)
    assert not row.startswith("rate") or first.config.compression_rate == int(row[5:])


@cores
def test_what_is_learned_from_is_what_acted(row):
    """Reading an episode by segments gives the log-probabilities that it was played with."""
    core = agent.make_core(row, 1).double()
    with torch.no_grad():
        core.output_matrix()[:OUTPUTS] = torch.tensor(
            np.random.default_rng(0).normal(size=(OUTPUTS, 32))
        )
    rollout = agent.play(core, 3, 7, np.random.default_rng(1), torch.Generator().manual_seed(1))
    logits, auxiliary = agent.read_episode(core, rollout.tokens)
    log_probs = logits[..., :ACTIONS].log_softmax(-1).gather(2, rollout.actions[..., None])[..., 0]
    assert (log_probs - rollout.log_probs).abs().max() < 1e-9 and rollout.log_probs.std() > 0.1
    assert row.startswith("rate") == bool(auxiliary > 0)


def test_a_rollout_is_whole_episodes():
    rollout = agent.play(
        agent.make_core("memformer"),
        40,
        2,
        np.random.default_rng(4),
        torch.Generator().manual_seed(4),
    )
    world = matching.begin(40, 2, np.random.default_rng(4))
    for step in range(matching.LENGTH):
        assert (rollout.tokens[:, step].numpy() == OUTPUTS + matching.observe(world)).all()
        assert (rollout.acted[:, step].numpy() == ~world.ended).all()
        world, rewards = matching.act(world, rollout.actions[:, step].numpy())
        assert (rollout.rewards[:, step].numpy() == rewards).all()
    assert {*rollout.actions.flatten().tolist()} == {*range(ACTIONS)}


def test_an_update_is_adams_of_the_objective_and_the_auxiliary_loss_one_rollout_behind(monkeypatch):
    """Nothing is left of the gradient before; it is clipped as the settings say; a seed gives the same agent again."""
    settings, rollouts, updates = (
        agent.SETTINGS | {"lanes": 3, "updates": 3, "clip": 0.5, "hall": 2 / 3},
        [],
        [],
    )
    play, clip, halls = agent.play, agent.average_and_clip, []
    monkeypatch.setattr(
        agent,
        "play",
        lambda *given_: halls.append(given_[2]) or rollouts.append(play(*given_)) or rollouts[-1],
    )

    def checked(model, iterations, limit):
        assert (iterations, limit, len(rollouts)) == (1, 0.5, len(updates) + 2), (
            "actors have played the next one already"
        )
        rollout = rollouts[len(updates)]
        logits, auxiliary = agent.read_episode(model, rollout.tokens)
        loss = (
            agent.objective(logits, rollout, settings["discount"], settings["entropy"]) + auxiliary
        )
        wanted = torch.autograd.grad(loss, [*model.parameters()])
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*wanted])
        norm = clip(model, iterations, limit)
        updates.append((model.embedding.detach().clone(), model.embedding.grad.clone()))
        return norm

    with monkeypatch.context() as patch:
        patch.setattr(agent, "average_and_clip", checked)
        successes = agent.train(agent.make_core("rate-4", 0), 0, settings, "")
    assert successes == pytest.approx(
        [(rollout.rewards > 0).any(1).double().mean().item() for rollout in rollouts[:3]]
    )
    (before, grad), (after, _), _ = updates
    torch.testing.assert_close(
        after, before - settings["learning_rate"] * grad / (grad.abs() + 1e-8)
    )
    assert halls == [0, 6, 12, 12], "of 13 lengths, in two updates of three"
    assert agent.train(agent.make_core("rate-4", 0), 0, settings, "") == successes
