"""A rollout of several segments, by a reference and by its accelerated model: everything that the two must agree on, by name.

Segments are (tokens, targets, scored) arrays of two lanes, and a reference's Task where the model has tasks; lane 1 starts a
document at segment `start`. The objective is the summed cross-entropy plus the auxiliary losses of every segment.
"""

import dataclasses

import numpy as np
import pytest
import torch
from agreement import assert_agree, named

from accelerated.data.tasks import Task
from accelerated.protocol import replace_lanes, require_gradient


def random_segments(config, rng, count=3):
    cut = []
    for _ in range(count):
        tokens, targets = rng.integers(config.vocabulary, size=(2, 2, config.segment))
        cut.append((tokens, targets, rng.random(tokens.shape) < 0.7))
    return cut


def by_lane(first, second):
    """Lane 0 of one state, lane 1 of another."""
    return type(first)(*(np.concatenate([a[:1], b[1:]]) for a, b in zip(first, second, strict=True)))


def reference_rollout(ref, params, config, segments, start, state):
    """{name: array} of losses, logits, states and gradients in float64."""
    caches, rows, total = [], {}, 0.0
    for index, (tokens, targets, scored, *task) in enumerate(segments):
        if index == start:
            state = by_lane(state, ref.initial_state(params, config, len(tokens)))
        logits, state, cache = ref.forward(params, config, tokens, state, None, *task)
        loss, loss_cache = ref.cross_entropy_forward(logits, targets, scored)
        losses, auxiliary_cache = (
            ref.auxiliary_forward(params, config, cache) if hasattr(ref, "auxiliary_forward") else ({}, None)
        )
        rows |= {f"logits {index}": logits} | named(f"state {index}", state)
        rows |= {f"auxiliary {index} {name}": np.array([loss]) for name, loss in losses.items()}
        total += loss
        caches.append((cache, loss_cache, auxiliary_cache))
    grads, dstate = {}, None
    for index in reversed(range(len(segments))):
        cache, loss_cache, auxiliary_cache = caches[index]
        dparams, dstate = ref.backward(params, config, cache, ref.cross_entropy_backward(1.0, loss_cache), dstate)
        ref.add_into(grads, dparams)
        if auxiliary_cache is not None:
            ref.add_into(grads, ref.auxiliary_backward(config, 1.0, auxiliary_cache))
        if index == start:
            zero = type(dstate)(*(np.zeros_like(field) for field in dstate))
            if hasattr(ref, "initial_state_backward"):
                ref.add_into(grads, ref.initial_state_backward(config, by_lane(zero, dstate)))
            dstate = by_lane(dstate, zero)
    rows |= {f"grad {name}": value for name, value in grads.items()} | named("grad state", dstate)
    return rows | {"loss": np.array([total])}


def accelerated_rollout(model, segments, start, state):
    """The same of a model; leaves the gradients in .grad."""
    leaf = require_gradient(state)
    state, total, rows = leaf, 0.0, {}
    objective = 0.0
    for index, (tokens, targets, scored, *task) in enumerate(segments):
        state = replace_lanes(torch.tensor([False, index == start]), model.initial_state(2), state)
        task = [Task(*(torch.tensor(field) for field in each)) for each in task]
        logits, state, auxiliary = model(torch.tensor(tokens), state, *task)
        picked = logits.log_softmax(-1).gather(-1, torch.tensor(targets)[..., None])[..., 0]
        loss = -picked[torch.tensor(scored)].sum()
        total, objective = total + loss, objective + loss + sum(auxiliary.values())
        rows |= {f"logits {index}": logits} | named(f"state {index}", state)
        rows |= {f"auxiliary {index} {name}": loss[None] for name, loss in auxiliary.items()}
    objective.backward()
    rows |= {f"grad {n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    dstate = type(leaf)(*(torch.zeros_like(f) if f.grad is None else f.grad for f in leaf))
    return rows | named("grad state", dstate) | {"loss": total[None]}


def filled(rows):
    """The rows that hold numbers: a state without rows of some kind has fields of size zero."""
    return {name: row for name, row in rows.items() if 0 not in row.shape}


def check_rollout(ref, params, model, config, state, to_torch, tolerance, title, segments=None):
    """Everything over three segments with a document start in the second, then the weights after five steps of descent."""
    segments = segments or random_segments(config, np.random.default_rng(5))
    expected = filled(reference_rollout(ref, params, config, segments, 1, state))
    assert_agree(expected, filled(accelerated_rollout(model, segments, 1, to_torch(state))), tolerance, title)
    five_steps(ref, params, model, config, segments, state, to_torch, tolerance)


def five_steps(ref, params, model, config, segments, state, to_torch, tolerance):
    """Momentum descent on both sides; the weights must still agree."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    momentum = {name: np.zeros_like(value) for name, value in params.items()}
    for _ in range(5):
        optimizer.zero_grad()
        rows = reference_rollout(ref, params, config, segments, 1, state)
        accelerated_rollout(model, segments, 1, to_torch(state))
        optimizer.step()
        momentum = {name: 0.9 * momentum[name] + rows[f"grad {name}"] for name in params}
        params = {name: value - 1e-3 * momentum[name] for name, value in params.items()}
    assert_agree(params, dict(model.state_dict()), tolerance, "weights after five steps")


def dropout_from(rng):
    """Stands in for torch's dropout with a reference's random numbers, so that both sides drop the same."""

    def dropout(x, rate, training=True):
        if not training or rate == 0:
            return x
        return x * torch.tensor((rng.random(tuple(x.shape)) >= rate) / (1 - rate))

    return dropout


def check_length_refused(ref, model_class, config, length, words):
    """A segment of that many tokens is refused with these words, on both sides."""
    params, model = ref.init_params(config, np.random.default_rng(0)), model_class(config)
    with pytest.raises(ValueError, match=words):
        ref.forward(params, config, np.zeros((1, length), int), ref.initial_state(params, config, 1))
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(1, length, dtype=torch.long), model.initial_state(1))


def check_causality(ref, params, model, config, state, to_torch, at, rng):
    """Another token at place `at` changes that place's logits and none before it, on both sides."""
    tokens = rng.integers(config.vocabulary, size=(1, config.segment))
    other = tokens.copy()
    other[0, at] = (other[0, at] + 1 + rng.integers(config.vocabulary - 1)) % config.vocabulary
    a, b = (ref.forward(params, config, t, state)[0] for t in (tokens, other))
    assert (a[:, :at] == b[:, :at]).all() and not np.isclose(a[:, at], b[:, at]).all()
    a, b = (model(torch.tensor(t), to_torch(state)).logits.detach().numpy() for t in (tokens, other))
    assert np.allclose(a[:, :at], b[:, :at], rtol=0, atol=1e-12) and not np.isclose(a[:, at], b[:, at]).all()


def check_gpu(model_class, config, tolerance, title):
    """Logits, states, losses and gradients in float32, and generation token by token, on a GPU as on the CPU."""
    torch.set_default_dtype(torch.float32)
    tokens, rows = torch.tensor(np.random.default_rng(5).integers(config.vocabulary, size=(2, config.segment))), {}
    for device in ("cpu", "cuda"):
        model = model_class(config, seed=9).to(device)
        state = model.advance(tokens.to(device), model.initial_state(2))
        output = model(tokens.to(device), state)
        (output.logits.square().sum() + sum(output.auxiliary.values())).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        _, stream = model.step(tokens[:, 0].to(device), output.state)
        found = {"logits": output.logits, "step": model.step(tokens[:, 1].to(device), stream)[0]} | gradients
        found |= {name: loss[None] for name, loss in output.auxiliary.items()}
        rows[device] = filled(found | named("state", output.state))
    assert_agree(rows["cpu"], rows["cuda"], tolerance, title)


def check_evaluation(model_class, config, state):
    """Evaluation drops nothing out, training does: logits and every field of the next state."""
    plain, dropping = (model_class(dataclasses.replace(config, dropout=rate), seed=3).eval() for rate in (0.0, 0.3))
    tokens = torch.randint(config.vocabulary, (2, config.segment))
    expected, actual = (model(tokens, state) for model in (plain, dropping))
    assert torch.equal(expected.logits, actual.logits)
    assert all(torch.equal(a, b) for a, b in zip(expected.state, actual.state, strict=True))
    assert not torch.equal(dropping.train()(tokens, state).logits, expected.logits)


def check_float32(model, config):
    """No float64 leaks into what a float32 model makes."""
    output = model(torch.zeros(1, config.segment, dtype=torch.long), model.initial_state(1))
    (output.logits.sum() + sum(output.auxiliary.values())).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert {t.dtype for t in (output.logits, *output.state, *output.auxiliary.values(), *grads)} == {torch.float32}
