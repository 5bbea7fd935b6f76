"""The agent: V-trace is the paper's sum, losses and gradients are those of definitions, what acts is what learns."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab import experiment
from accelerated.lab.systems import agent, matching
from accelerated.lab.systems.agent import ACTIONS, OUTPUTS
from accelerated.program.errors import InputError

FEW = agent.SETTINGS | {"lanes": 3, "updates": 3}
RESULTS = Path(__file__).parents[3] / "docs" / "results"
OPTIONS = ["--rows", "rate-4", "lstm", "--seeds", "0", "1"]
cores = pytest.mark.parametrize("row", agent.ROWS)


def drawn(seed, lanes=2, steps=6):
    """Random arguments of V-trace: episodes end here and there, and with the last step."""
    rng = np.random.default_rng(seed)
    behaviour, target = np.log(rng.uniform(0.1, 1, (2, lanes, steps)))
    discounts = 0.9 * (rng.random((lanes, steps)) < 0.8)
    discounts[:, -1] = 0
    return behaviour, target, rng.normal(size=(lanes, steps)), discounts, rng.normal(size=(lanes, steps))


def equation_1(behaviour, target, rewards, discounts, values):
    """v_s of one lane as Espeholt et al. write it: a sum over t of products over i."""
    ratio, following, targets = np.minimum(1, np.exp(target - behaviour)), [*values[1:], 0], []
    for s in range(len(values)):
        total = values[s]
        for t in range(s, len(values)):
            delta = ratio[t] * (rewards[t] + discounts[t] * following[t] - values[t])
            total += np.prod([discounts[i] * ratio[i] for i in range(s, t)]) * delta
        targets.append(total)
    return np.array(targets), ratio * (rewards + discounts * np.array([*targets[1:], 0]) - values)


def random_rollout(seed, lanes=3, steps=5):
    """A Rollout whose lanes end at different steps, and logits (B, T, OUTPUTS)."""
    rng = np.random.default_rng(seed)
    acted = torch.tensor(np.arange(steps) < rng.integers(1, steps + 1, lanes)[:, None])
    actions = torch.tensor(rng.integers(ACTIONS, size=(lanes, steps)))
    log_probs = torch.tensor(np.log(rng.uniform(0.05, 0.9, (lanes, steps))))
    rewards = torch.tensor(rng.normal(size=(lanes, steps))) * acted
    return agent.Rollout(actions, actions, log_probs, rewards, acted), torch.tensor(rng.normal(size=(lanes, steps, OUTPUTS)))


@given(st.integers(0, 10**6))
def test_vtrace_is_equation_1(seed):
    given_ = drawn(seed)
    ours = agent.vtrace(*map(torch.tensor, given_))
    for lane in range(2):
        expected = equation_1(*(x[lane] for x in given_))
        assert all(np.allclose(x[lane], wanted, atol=1e-12) for x, wanted in zip(ours, expected, strict=True))


@given(st.integers(0, 10**6))
def test_on_policy_it_is_the_return(seed):
    """Of all remaining steps (Espeholt et al., Eq. 2)."""
    behaviour, _, rewards, discounts, values = map(torch.tensor, drawn(seed))
    targets, advantages = agent.vtrace(behaviour, behaviour, rewards, discounts, values)
    after, returns = torch.zeros(2), []
    for step in reversed(range(6)):
        after = rewards[:, step] + discounts[:, step] * after
        returns.insert(0, after)
    assert torch.allclose(targets, torch.stack(returns, 1)) and torch.allclose(advantages, targets - values)


@given(st.integers(0, 10**6))
def test_the_objective_is_that_of_the_definition(seed):
    rollout, logits = random_rollout(seed)
    policy, value, entropy, count = 0.0, 0.0, 0.0, int(rollout.acted.sum())
    for lane, of_lane in enumerate(logits.numpy()):
        length = int(rollout.acted[lane].sum())
        log_policy = of_lane[:length, :ACTIONS] - np.log(np.exp(of_lane[:length, :ACTIONS]).sum(1, keepdims=True))
        target = log_policy[np.arange(length), rollout.actions[lane, :length]]
        discounts = np.array([0.7] * (length - 1) + [0.0])
        given_ = (rollout.log_probs[lane, :length].numpy(), target, rollout.rewards[lane, :length].numpy(), discounts)
        wanted, advantages = equation_1(*given_, of_lane[:length, ACTIONS])
        policy -= (target * advantages).sum() / count
        value += ((wanted - of_lane[:length, ACTIONS]) ** 2).sum() / count
        entropy -= (np.exp(log_policy) * log_policy).sum() / count
    for weight in (0.0, 0.3, 5.0):
        ours = float(agent.objective(logits, rollout, 0.7, weight))
        assert np.isclose(ours, policy + 0.5 * value - weight * entropy, atol=1e-12)


@given(st.integers(0, 10**6))
def test_gradients_are_those_of_the_paper_and_targets_have_none(seed):
    """Section 4.2: rho (r + gamma v' - V) grad log pi, and (v - V) grad V."""
    rollout, logits = random_rollout(seed)
    logits.requires_grad_()
    agent.objective(logits, rollout, 0.7, 0.0).backward()
    policy, values = logits.detach()[..., :ACTIONS].softmax(-1), logits.detach()[..., ACTIONS]
    log_probs = policy.log().gather(2, rollout.actions[..., None])[..., 0]
    continues = torch.cat([rollout.acted[:, 1:], torch.zeros(3, 1, dtype=torch.bool)], 1)
    targets, advantages = agent.vtrace(rollout.log_probs, log_probs, rollout.rewards, 0.7 * continues, values)
    weights = rollout.acted / rollout.acted.sum()
    chosen = torch.nn.functional.one_hot(rollout.actions, ACTIONS)
    assert torch.allclose(logits.grad[..., :ACTIONS], (weights * advantages)[..., None] * (policy - chosen))
    assert torch.allclose(logits.grad[..., ACTIONS], weights * (values - targets))


def test_the_entropys_gradient_is_that_of_finite_differences():
    rollout, logits = random_rollout(3)

    def entropy(x):
        return agent.objective(x, rollout, 0.7, 0.0) - agent.objective(x, rollout, 0.7, 1.0)

    assert torch.autograd.gradcheck(entropy, logits.requires_grad_())


@cores
def test_what_is_learned_from_is_what_acted(row):
    """Reading an episode by segments gives the log-probabilities that it was played with, step by step."""
    torch.set_default_dtype(torch.float64)
    try:
        core = agent.make_core(row, 1).double()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        core.output_matrix()[:OUTPUTS] = torch.tensor(np.random.default_rng(0).normal(size=(OUTPUTS, 32)))
    rollout = agent.play(core, 3, np.random.default_rng(1), torch.Generator().manual_seed(1))
    logits, auxiliary = agent.read_episode(core, rollout.tokens)
    log_policy = logits[..., :ACTIONS].log_softmax(-1)
    log_probs = log_policy.gather(2, rollout.actions[..., None])[..., 0]
    assert logits.shape == (3, matching.LENGTH, OUTPUTS) and (log_probs - rollout.log_probs).abs().max() < 1e-9
    assert rollout.log_probs.std() > 0.1 and row.startswith("rate") == bool(auxiliary > 0)


@cores
def test_a_core_begins_with_equal_actions_and_from_its_seed(row):
    first, same, other = (agent.make_core(row, seed) for seed in (0, 0, 1))
    tokens = torch.arange(OUTPUTS, OUTPUTS + 12)[None]
    assert not agent.read_episode(first, tokens)[0].any()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.embedding, other.embedding)


def test_a_core_remembers_the_first_room_and_an_lstm_learns_through_it():
    """The last segment's logits depend on the first segment; an LSTM's also have gradient into it."""
    tokens = torch.randint(OUTPUTS, agent.VOCABULARY, (2, matching.LENGTH), generator=torch.Generator().manual_seed(0))
    others = tokens.clone()
    others[:, 3] = OUTPUTS + (others[:, 3] - OUTPUTS + 1) % matching.OBSERVATIONS
    for row in [*agent.ROWS][2:]:
        core = agent.make_core(row, 2)
        with torch.no_grad():
            core.output_matrix()[:OUTPUTS] = 1.0 + torch.arange(32) % 5
        logits = [agent.read_episode(core, seen)[0][:, -1] for seen in (tokens, others)]
        assert (logits[0] - logits[1]).abs().max() > 1e-7, row
    logits[0][0].sum().backward()  # of the LSTM
    assert row == "lstm" and core.embedding.grad[tokens[0, 3]].abs().sum() > 0


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
    agent.train(agent.make_core("lstm"), 0, FEW, "")
    assert apart[0] < 1e-6 < 1e-4 < min(apart[1:])


def test_an_agent_learns_what_is_rewarded(monkeypatch):
    """Here any object that is taken; and a seed gives the same agent again."""
    act = matching.act
    monkeypatch.setattr(matching, "act", lambda *given_: (lambda world, rewards: (world, abs(rewards)))(*act(*given_)))
    settings = agent.SETTINGS | {"lanes": 32, "learning_rate": 0.02}
    successes, again = (agent.train(agent.make_core("lstm"), 3, settings | {"updates": count}, "") for count in (60, 3))
    assert successes[:3] == again and np.mean(successes[:10]) < 0.75 and np.mean(successes[-10:]) > 0.85


def test_an_updates_gradient_is_that_of_its_own_objective_and_auxiliary_loss(monkeypatch):
    """Of the rollout before the newest one, with nothing left of the update before; clipped as the settings say."""
    settings, rollouts, updates = FEW | {"clip": 0.5}, [], []
    play, clip = agent.play, agent.average_and_clip
    monkeypatch.setattr(agent, "play", lambda *given_: rollouts.append(play(*given_)) or rollouts[-1])

    def checked(model, iterations, limit):
        core, rollout = copy.deepcopy(model), rollouts[len(updates)]
        core.zero_grad()
        logits, auxiliary = agent.read_episode(core, rollout.tokens)
        (agent.objective(logits, rollout, settings["discount"], settings["entropy"]) + auxiliary).backward()
        for (name, parameter), wanted in zip(model.named_parameters(), core.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad, msg=name)
        updates.append((iterations, limit))
        return clip(model, iterations, limit)

    monkeypatch.setattr(agent, "average_and_clip", checked)
    agent.train(agent.make_core("rate-4", 0), 0, settings, "")
    assert updates == [(1, 0.5)] * 3


def test_a_gradient_that_is_nan_is_one_line():
    core = agent.make_core("lstm")
    with pytest.raises(InputError, match="the gradient norm is nan at step 1; this agent was not kept"):
        agent.train(core, 0, FEW | {"entropy": float("nan")}, "")


def test_an_episodes_auxiliary_loss_is_the_mean_over_its_segments():
    core = agent.make_core("rate-4", 0)
    tokens = torch.randint(OUTPUTS, agent.VOCABULARY, (2, matching.LENGTH), generator=torch.Generator().manual_seed(0))
    state, losses = core.initial_state(2), []
    for segment in tokens.split(12, 1):
        output = core(segment, state)
        losses.append(sum(output.auxiliary.values()).item())
        state = output.state
    assert len(losses) == 3 and losses[0] != losses[1]
    assert agent.read_episode(core, tokens)[1].item() == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_memories_have_the_sizes_that_the_page_tells():
    """Equal widths; those that forget by age have less than an episode."""
    rows = [row for row in agent.ROWS if row != "lstm"]
    fields = {row: {f: tuple(x.shape[1:]) for f, x in agent.make_core(row).initial_state(1)._asdict().items()} for row in rows}
    for rate in (1, 2, 3, 4, 6):
        assert fields[f"rate-{rate}"] == {"memory": (2, 6, 32), "compressed": (2, 6, 32)}
        assert agent.make_core(f"rate-{rate}").config.compression_rate == rate
    assert fields["block_recurrent"] == {"states": (1, 8, 32), "keys": (2, 2, 6, 16), "values": (2, 2, 6, 16)}
    assert fields["memformer"]["memory"] == (1, 8, 32)
    assert fields["memorizing"]["memory_keys"] == (2, 36, 16) and fields["memorizing"]["keys"] == (2, 2, 12, 16)
    assert [field.shape for field in agent.make_core("lstm").initial_state(5)] == [(1, 5, 32)] * 2
    assert agent.make_core("pretrained_recurrence").config.layers == 3


def test_an_lstm_begins_with_zeros_and_logits_of_variance_one():
    core = agent.make_core("lstm", 3)
    assert not any(field.any() for field in core.initial_state(2))
    assert 0.9 < core.output_matrix()[OUTPUTS:].std() * 32**0.5 < 1.1


# The command


@pytest.fixture
def trained(monkeypatch):
    """Agents that are trained at once: those of rate 4 are right ever more often, the others half of the time."""
    asked = []

    def run(row, seed):
        asked.append((row, seed))
        successes = [min(1.0, 0.5 + 0.1 * point * (row == "rate-4") + 0.02 * seed) for point in range(5)]
        return {"successes": successes, "seconds": 60.0 + seed}

    monkeypatch.setattr(agent, "run", run)
    monkeypatch.setattr(agent, "SETTINGS", agent.SETTINGS | {"updates": 50})
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)  # of this whole process
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot: matplotlib")
    return asked


def test_the_page_says_what_came_out(trained, tmp_path, capsys):
    agent.main([*OPTIONS, "--out", str(tmp_path / "pages")])
    page = (tmp_path / "pages" / "compressive-figure-5.md").read_text()
    assert trained == [("rate-4", 0), ("lstm", 0), ("rate-4", 1), ("lstm", 1)]
    assert "| rate-4 | 0, 1 | 91.0 (90.0 .. 92.0) | 0.23, 0.23 |" in page  # 5 points of 10 x 128 x 36 steps
    assert "| lstm | 0, 1 | 51.0 (50.0 .. 52.0) | not, not |" in page
    assert "one thread: 50 updates of 128 episodes of 36" in page.replace("\n", " ")
    assert max(map(len, page.splitlines())) <= 120 and "](compressive-figure-5.svg)" in page
    assert (tmp_path / "pages" / "compressive-figure-5.svg").read_text().startswith("<?xml")
    assert "rate-4, seed 1: 92.0% right at the end, 61 s" in capsys.readouterr().out


def test_what_was_trained_is_kept_and_not_trained_again(trained, tmp_path, monkeypatch):
    run, out = agent.run, ["--out", str(tmp_path)]

    def interrupted(row, seed):
        if (row, seed) == ("rate-4", 1):
            raise KeyboardInterrupt
        return run(row, seed)

    monkeypatch.setattr(agent, "run", interrupted)
    with pytest.raises(KeyboardInterrupt, match="what was trained is kept; continue with the same command"):
        agent.main([*OPTIONS, *out])
    assert not (tmp_path / "compressive-figure-5.md").exists()
    monkeypatch.setattr(agent, "run", run)
    agent.main([*OPTIONS, *out])
    agent.main(["--rows", "rate-1", "--seeds", "10", "2", *out])
    assert trained == [("rate-4", 0), ("lstm", 0), ("rate-4", 1), ("lstm", 1), ("rate-1", 10), ("rate-1", 2)]
    record = json.loads((tmp_path / "compressive-figure-5.json").read_text())
    assert list(record["runs"]) == ["rate-1", "rate-4", "lstm"] and list(record["runs"]["rate-1"]) == ["2", "10"]


def test_a_record_names_every_machine_that_trained_for_it(trained, tmp_path, monkeypatch):
    for name, row in (("2 cores of A", "lstm"), ("2 cores of B", "rate-4"), ("2 cores of A", "rate-1")):
        monkeypatch.setattr(experiment, "machine", lambda name=name: name)
        agent.main(["--rows", row, "--seeds", "0", "--out", str(tmp_path)])
    assert "2 cores of A and 2 cores of B, torch" in (tmp_path / "compressive-figure-5.md").read_text().replace("\n", " ")


def test_input_that_cannot_work_is_one_line_and_changes_nothing(trained, tmp_path, monkeypatch):
    path = tmp_path / "compressive-figure-5.json"
    agent.main([*OPTIONS, "--out", str(tmp_path)])
    for words, line in (
        (["--rows", "rate-5"], "--rows is 'rate-5'; it must be one of rate-1, .*nearest: rate-"),
        (["--seeds", "0", "-1"], "--seeds -1 must be at least 0"),
    ):
        before = path.read_bytes()
        with pytest.raises(InputError, match=line):
            agent.main([*OPTIONS, *words, "--out", str(tmp_path)])
        assert path.read_bytes() == before
    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match=r"runs of other settings, .*'updates': 50} and not .*60}"),
    ):
        patch.setattr(agent, "SETTINGS", agent.SETTINGS | {"updates": 60})
        agent.main([*OPTIONS, "--out", str(tmp_path)])
    assert path.read_bytes() == before
    path.write_text('{"settings": ')
    with pytest.raises(InputError, match=r"figure-5\.json cannot be read .*; remove it, or give another --out"):
        agent.main([*OPTIONS, "--out", str(tmp_path)])
    assert path.read_text() == '{"settings": '
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*; give another --out"):
        agent.main([*OPTIONS, "--out", str(tmp_path / "file")])
    assert len(trained) == 4


def test_two_commands_do_not_write_one_record(trained, tmp_path):
    with FileLock(tmp_path / "compressive-figure-5.lock"), pytest.raises(InputError, match="another process trains for"):
        agent.main([*OPTIONS, "--out", str(tmp_path)])
    assert not trained
    agent.main([*OPTIONS, "--out", str(tmp_path)])


def test_a_point_of_a_curve_is_a_mean_of_ten_updates(monkeypatch):
    calls = []
    monkeypatch.setattr(agent, "train", lambda *given_: calls.append(given_) or [*range(20)])
    assert agent.run("rate-3", 7)["successes"] == [4.5, 14.5]
    [(core, seed, settings, _)] = calls
    assert core.config.compression_rate == 3 and settings is agent.SETTINGS and seed == 7
    assert not agent.make_core("rate-3", 7).embedding.ne(core.embedding).any()


def test_the_kept_page_is_that_of_its_record():
    record = json.loads((RESULTS / "compressive-figure-5.json").read_text())
    assert (RESULTS / "compressive-figure-5.md").read_text() == agent.page(record)
    assert record["settings"] == agent.SETTINGS and record["runs"].keys() == agent.ROWS.keys()
    assert {len(run["successes"]) for runs in record["runs"].values() for run in runs.values()} == {50}
