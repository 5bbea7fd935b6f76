"""The agent: V-trace is the paper's sum, losses and gradients are those of definitions, what acts is what learns."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import agent, matching
from accelerated.lab.systems.agent import ACTIONS, OUTPUTS
from accelerated.program.errors import InputError

FEW = agent.Settings(lanes=3)
cores = pytest.mark.parametrize("name", agent.CORES)


def drawn(seed, lanes=2, steps=6):
    """Random arguments of V-trace: episodes end here and there."""
    rng = np.random.default_rng(seed)
    behaviour, target = np.log(rng.uniform(0.1, 1, (2, lanes, steps)))
    discounts = 0.9 * (rng.random((lanes, steps)) < 0.8)
    return behaviour, target, rng.normal(size=(lanes, steps)), discounts, rng.normal(size=(lanes, steps)), rng.normal(size=lanes)


def equation_1(behaviour, target, rewards, discounts, values, bootstrap, rho_bar=1.0, c_bar=1.0):
    """v_s of one lane as Espeholt et al. write it: a sum over t of products over i."""
    ratio, following, found = np.exp(target - behaviour), [*values[1:], bootstrap], []
    for s in range(len(values)):
        total = values[s]
        for t in range(s, len(values)):
            delta = min(rho_bar, ratio[t]) * (rewards[t] + discounts[t] * following[t] - values[t])
            total += np.prod([discounts[i] * min(c_bar, ratio[i]) for i in range(s, t)]) * delta
        found.append(total)
    after = np.array([*found[1:], bootstrap])
    advantages = np.minimum(rho_bar, ratio) * (rewards + discounts * after - values)
    return np.array(found), advantages


def random_rollout(seed, lanes=3, steps=5):
    """A Rollout whose lanes end at different steps, and logits (B, T, OUTPUTS)."""
    rng = np.random.default_rng(seed)
    acted = torch.tensor(np.arange(steps) < rng.integers(1, steps + 1, lanes)[:, None])
    actions = torch.tensor(rng.integers(ACTIONS, size=(lanes, steps)))
    log_probs = torch.tensor(np.log(rng.uniform(0.05, 0.9, (lanes, steps))))
    rewards = torch.tensor(rng.normal(size=(lanes, steps))) * acted
    return agent.Rollout(actions, actions, log_probs, rewards, acted), torch.tensor(rng.normal(size=(lanes, steps, OUTPUTS)))


@given(st.integers(0, 10**6), st.sampled_from([(1.0, 1.0), (2.0, 0.5), (0.3, 4.0)]))
def test_vtrace_is_equation_1(seed, bars):
    given_ = drawn(seed)
    found = agent.vtrace(*map(torch.tensor, given_), *bars)
    for lane in range(2):
        expected = equation_1(*(x[lane] for x in given_), *bars)
        assert all(np.allclose(own[lane], wanted, atol=1e-12) for own, wanted in zip(found, expected, strict=True))


@given(st.integers(0, 10**6))
def test_on_policy_it_is_the_return(seed):
    """Of all remaining steps, with the value after the last (Espeholt et al., Eq. 2)."""
    behaviour, _, rewards, discounts, values, bootstrap = map(torch.tensor, drawn(seed))
    found = agent.vtrace(behaviour, behaviour, rewards, discounts, values, bootstrap)
    after, returns = bootstrap, []
    for step in reversed(range(6)):
        after = rewards[:, step] + discounts[:, step] * after
        returns.insert(0, after)
    assert torch.allclose(found.values, torch.stack(returns, 1)) and torch.allclose(found.advantages, found.values - values)


@given(st.integers(0, 10**6))
def test_losses_are_those_of_the_definition(seed):
    rollout, logits = random_rollout(seed)
    policy, value, entropy, count = 0.0, 0.0, 0.0, int(rollout.acted.sum())
    for lane, own in enumerate(logits.numpy()):
        length = int(rollout.acted[lane].sum())
        log_policy = own[:length, :ACTIONS] - np.log(np.exp(own[:length, :ACTIONS]).sum(1, keepdims=True))
        target = log_policy[np.arange(length), rollout.actions[lane, :length]]
        discounts = np.array([0.7] * (length - 1) + [0.0])
        given_ = (rollout.log_probs[lane, :length].numpy(), target, rollout.rewards[lane, :length].numpy(), discounts)
        wanted, advantages = equation_1(*given_, own[:length, ACTIONS], 0.0)
        policy -= (target * advantages).sum() / count
        value += ((wanted - own[:length, ACTIONS]) ** 2).sum() / count
        entropy -= (np.exp(log_policy) * log_policy).sum() / count
    found = agent.actor_critic(logits, rollout, 0.7)
    assert np.allclose([*map(float, found)], [policy, value, entropy], atol=1e-12)
    assert np.isclose(float(found.objective(0.3)), policy + 0.5 * value - 0.3 * entropy, atol=1e-12)


@given(st.integers(0, 10**6))
def test_gradients_are_those_of_the_paper_and_targets_have_none(seed):
    """Section 4.2: rho (r + gamma v' - V) grad log pi, and (v - V) grad V."""
    rollout, logits = random_rollout(seed)
    logits.requires_grad_()
    agent.actor_critic(logits, rollout, 0.7).objective(0.0).backward()
    policy, values = logits.detach()[..., :ACTIONS].softmax(-1), logits.detach()[..., ACTIONS]
    log_probs = policy.log().gather(2, rollout.actions[..., None])[..., 0]
    continues = torch.cat([rollout.acted[:, 1:], torch.zeros(3, 1, dtype=torch.bool)], 1)
    targets = agent.vtrace(rollout.log_probs, log_probs, rollout.rewards, 0.7 * continues, values, torch.zeros(3).double())
    weights = rollout.acted / rollout.acted.sum()
    chosen = torch.nn.functional.one_hot(rollout.actions, ACTIONS)
    assert torch.allclose(logits.grad[..., :ACTIONS], (weights * targets.advantages)[..., None] * (policy - chosen))
    assert torch.allclose(logits.grad[..., ACTIONS], weights * (values - targets.values))


def test_the_entropys_gradient_is_that_of_finite_differences():
    rollout, logits = random_rollout(3)
    assert torch.autograd.gradcheck(lambda x: agent.actor_critic(x, rollout, 0.7).entropy, logits.requires_grad_())


@cores
def test_what_is_learned_from_is_what_acted(name):
    """Reading an episode by segments gives the log-probabilities that it was played with, step by step."""
    torch.set_default_dtype(torch.float64)
    try:
        core = agent.make_core(name, 1).double()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        core.output_matrix()[:OUTPUTS] = torch.tensor(np.random.default_rng(0).normal(size=(OUTPUTS, 32)))
    rollout = agent.play(core, 3, np.random.default_rng(1), torch.Generator().manual_seed(1))
    logits, auxiliary = agent.read_episode(core, rollout.tokens)
    log_policy = logits[..., :ACTIONS].log_softmax(-1)
    log_probs = log_policy.gather(2, rollout.actions[..., None])[..., 0]
    assert logits.shape == (3, matching.LENGTH, OUTPUTS) and (log_probs - rollout.log_probs).abs().max() < 1e-9
    assert rollout.log_probs.std() > 0.1 and (name == "compressive") == bool(auxiliary > 0)


@cores
def test_a_core_begins_with_equal_actions_and_from_its_seed(name):
    first, same, other = (agent.make_core(name, seed) for seed in (0, 0, 1))
    tokens = torch.arange(OUTPUTS, OUTPUTS + 12)[None]
    assert not agent.read_episode(first, tokens)[0].any()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.embedding, other.embedding)


def test_a_core_remembers_the_first_room_and_an_lstm_learns_through_it():
    """The last segment's logits depend on the first segment; an LSTM's also have gradient into it."""
    tokens = torch.randint(OUTPUTS, agent.VOCABULARY, (2, matching.LENGTH), generator=torch.Generator().manual_seed(0))
    others = tokens.clone()
    others[:, 3] = OUTPUTS + (others[:, 3] - OUTPUTS + 1) % matching.OBSERVATIONS
    for name in agent.CORES:
        core = agent.make_core(name, 2, **({"compression_rate": 3} if name == "compressive" else {}))
        with torch.no_grad():
            core.output_matrix()[:OUTPUTS] = 1.0 + torch.arange(32) % 5
        logits = [agent.read_episode(core, own)[0][:, -1] for own in (tokens, others)]
        assert (logits[0] - logits[1]).abs().max() > 1e-7, name
    logits[0][0].sum().backward()  # of the LSTM
    assert name == "lstm" and core.embedding.grad[tokens[0, 3]].abs().sum() > 0


def test_a_rollout_is_whole_episodes():
    rollout = agent.play(agent.make_core("lstm"), 40, np.random.default_rng(4), torch.Generator().manual_seed(4))
    world = matching.begin(40, np.random.default_rng(4))
    for step in range(matching.LENGTH):
        assert (rollout.tokens[:, step].numpy() == OUTPUTS + matching.observe(world)).all()
        assert (rollout.acted[:, step].numpy() == ~world.ended).all()
        world, rewards = matching.act(world, rollout.actions[:, step].numpy())
        assert (rollout.rewards[:, step].numpy() == rewards).all()
    assert {*rollout.actions.flatten().tolist()} == {*range(ACTIONS)}


def test_actors_are_one_update_behind(monkeypatch):
    apart, vtrace = [], agent.vtrace
    monkeypatch.setattr(agent, "vtrace", lambda mu, pi, *others: apart.append((mu - pi).abs().max()) or vtrace(mu, pi, *others))
    list(itertools.islice(agent.train(agent.make_core("lstm"), FEW, 0), 3))
    assert apart[0] < 1e-6 < 1e-4 < min(apart[1:])


def test_an_agent_learns_what_is_rewarded(monkeypatch):
    """Here any object that is taken; and a seed gives the same agent again."""
    act = matching.act
    monkeypatch.setattr(matching, "act", lambda *given_: (lambda world, rewards: (world, abs(rewards)))(*act(*given_)))
    settings = agent.Settings(lanes=32, learning_rate=0.02)
    found, again = (list(itertools.islice(agent.train(agent.make_core("lstm"), settings, 3), count)) for count in (60, 3))
    assert found[:3] == again and np.mean(found[:10]) < 0.75 and np.mean(found[-10:]) > 0.85


def test_an_updates_gradient_is_that_of_its_own_objective_and_auxiliary_loss(monkeypatch):
    """Of the rollout before the newest one, with nothing left of the update before; clipped as the settings say."""
    settings, rollouts, updates = FEW._replace(clip=0.5), [], []
    play, clip = agent.play, agent.average_and_clip
    monkeypatch.setattr(agent, "play", lambda *given_: rollouts.append(play(*given_)) or rollouts[-1])

    def checked(model, iterations, limit):
        core, rollout = copy.deepcopy(model), rollouts[len(updates)]
        core.zero_grad()
        logits, auxiliary = agent.read_episode(core, rollout.tokens)
        (agent.actor_critic(logits, rollout, settings.discount).objective(settings.entropy) + auxiliary).backward()
        for (name, own), wanted in zip(model.named_parameters(), core.parameters(), strict=True):
            torch.testing.assert_close(own.grad, wanted.grad, msg=name)
        updates.append((iterations, limit))
        return clip(model, iterations, limit)

    monkeypatch.setattr(agent, "average_and_clip", checked)
    list(itertools.islice(agent.train(agent.make_core("compressive", 0), settings, 0), 3))
    assert updates == [(1, 0.5)] * 3


def test_a_gradient_that_is_nan_is_one_line():
    core = agent.make_core("lstm")
    with pytest.raises(InputError, match="the gradient norm is nan at step 1; this agent was not kept"):
        next(agent.train(core, FEW._replace(entropy=float("nan")), 0))


def test_an_episodes_auxiliary_loss_is_the_mean_over_its_segments():
    core = agent.make_core("compressive", 0)
    tokens = torch.randint(OUTPUTS, agent.VOCABULARY, (2, matching.LENGTH), generator=torch.Generator().manual_seed(0))
    state, found = core.initial_state(2), []
    for segment in tokens.split(12, 1):
        output = core(segment, state)
        found.append(sum(output.auxiliary.values()).item())
        state = output.state
    assert len(found) == 3 and found[0] != found[1]
    assert agent.read_episode(core, tokens)[1].item() == pytest.approx(sum(found) / 3, rel=1e-6)


def test_memories_have_the_sizes_that_the_page_tells():
    """Equal widths; those that forget by age have less than an episode."""
    fields = {
        name: {f: tuple(x.shape[1:]) for f, x in agent.make_core(name).initial_state(1)._asdict().items()} for name in agent.CORES
    }
    assert fields["compressive"] == {"memory": (2, 6, 32), "compressed": (2, 6, 32)}
    assert fields["block_recurrent"] == {"states": (1, 8, 32), "keys": (2, 2, 6, 16), "values": (2, 2, 6, 16)}
    assert fields["memformer"]["memory"] == (1, 8, 32)
    assert fields["memorizing"]["memory_keys"] == (2, 36, 16) and fields["memorizing"]["keys"] == (2, 2, 12, 16)
    assert fields["lstm"] == {"hidden": (1, 32), "cell": (1, 32)}
    assert agent.make_core("pretrained_recurrence").config.layers == 3


def test_an_lstm_begins_with_zeros_and_logits_of_variance_one():
    core = agent.make_core("lstm", 3)
    assert not any(field.any() for field in core.initial_state(2))
    assert 0.9 < core.output_matrix()[OUTPUTS:].std() * 32**0.5 < 1.1
