"""The gradients in reference/ are written by hand. Finite differences show that they are right.

For every paper: the loss of two segments, the second of which reads the state that the first one
leaves. All parameters and the first state move along a random direction, by a small step h either
way. Then (loss(+h) - loss(-h)) / 2h must be the sum of gradient times direction. One wrong number
in any gradient would show; the failure then says which. `pytest -s` prints both sums.

Some gradients are stopped by a paper: Compressive's memories, for example, are written without
gradient. Such a field of the state is data here, the same constants in all these losses.
"""

from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

from reference import (
    block_recurrent,
    compressive,
    gated_deltanet,
    memformer,
    memorizing,
    pretrained_recurrence,
)

B = 3  # lanes: documents side by side
STEP = 1e-7  # h
TOLERANCE = 1e-6  # the largest relative error; NumPy computes in float64

# Most sizes differ, so that no axis is taken for another
SIZES = {"vocabulary": 13, "width": 8, "heads": 2, "feed_forward": 7}
LAYERS = SIZES | {"layers": 4, "head_width": 5}
BLOCKS = LAYERS | {"window": 6, "segment": 12, "states": 9, "recurrent_layers": (2,)}
LSTM_GATES = BLOCKS | {"gate": "lstm", "configuration": "dual", "feedback": True}
ROWS = LAYERS | {"segment": 12, "compression_rate": 2, "memory": 15, "compressed_memory": 10}
BY_AUTO_ENCODING = ROWS | {"compression_loss": "auto_encoding"}
BY_BPTT = ROWS | {"compression_loss": "bptt"}
SLOTS = SIZES | {
    "encoder_layers": 1,
    "decoder_layers": 4,
    "head_width": 5,
    "segment": 6,
    "slots": 9,
}
DECODER_ONLY = SLOTS | {"encoder_layers": 0}
KEYS = LAYERS | {"segment": 6, "memory": 14, "retrieved": 10}
DELTA = LAYERS | {"segment": 6, "value_width": 9}
GPT2 = SIZES | {"layers": 4, "segment": 6, "max_positions": 9, "module_width": 5}
SEVERAL_VECTORS = GPT2 | {"vectors": 11, "pooling": "attention"}


class Paper(NamedTuple):
    reference: ModuleType
    sizes: dict
    data: tuple  # the fields of the state that no gradient passes through


PAPERS = {
    "Block-Recurrent, fixed gate": Paper(block_recurrent, BLOCKS, ()),
    "Block-Recurrent, LSTM gates, feedback": Paper(block_recurrent, LSTM_GATES, ()),
    "Compressive, attention reconstruction": Paper(compressive, ROWS, ("memory", "compressed")),
    "Compressive, auto-encoding": Paper(compressive, BY_AUTO_ENCODING, ("memory", "compressed")),
    "Compressive, trained by BPTT": Paper(compressive, BY_BPTT, ("memory",)),
    "Gated DeltaNet": Paper(gated_deltanet, DELTA, ()),
    "Memformer": Paper(memformer, SLOTS, ("previous",)),
    "Memformer, decoder-only": Paper(memformer, DECODER_ONLY, ("previous",)),
    "Memorizing": Paper(memorizing, KEYS, ("memory_keys", "memory_values")),
    "Recurrence in GPT-2": Paper(pretrained_recurrence, GPT2, ("present",)),
    "Recurrence in GPT-2, vectors": Paper(pretrained_recurrence, SEVERAL_VECTORS, ("present",)),
}


class Setting(NamedTuple):
    """What the losses are a function of."""

    paper: Paper
    config: object
    params: dict
    shift: tuple  # a state: what is added to the initial one
    segments: list  # of (tokens, targets), both (B, N)


def forward(setting):
    """Read the segments: ({name: loss}, what `backward` needs)."""
    paper, config, params, shift, segments = setting
    ref = paper.reference
    start = ref.initial_state(params, config, B)
    state = type(start)(*(a + b for a, b in zip(start, shift, strict=True)))
    constants = {field: getattr(shift, field) for field in paper.data}

    losses = {"task": 0.0, "compression": 0.0}
    caches = []
    for tokens, targets in segments:
        logits, state, cache = ref.forward(params, config, tokens, state)
        nats, loss_cache = ref.cross_entropy_forward(logits, targets, np.ones(targets.shape, bool))
        losses["task"] += nats
        auxiliary_cache = None
        if ref is compressive:
            auxiliary, auxiliary_cache = ref.auxiliary_forward(params, config, cache)
            losses["compression"] += sum(auxiliary.values())
        caches.append((cache, loss_cache, auxiliary_cache))
        state = state._replace(**constants)  # no gradient passes: the next segment reads data
    return losses, caches


def backward(setting, caches):
    """{loss: {name: gradient}} by hand, from the last segment to the first."""
    ref = setting.paper.reference
    task = {}
    compression = {}
    dstate = None
    for cache, loss_cache, auxiliary_cache in reversed(caches):
        dlogits = ref.cross_entropy_backward(1.0, loss_cache)
        grads, dstate = ref.backward(setting.params, setting.config, cache, dlogits, dstate)
        ref.add_into(task, grads)
        if auxiliary_cache:
            own = ref.auxiliary_backward(setting.config, 1.0, auxiliary_cache)
            ref.add_into(compression, own)
    if hasattr(ref, "initial_state_backward"):  # documents start from a state that is learned
        ref.add_into(task, ref.initial_state_backward(setting.config, dstate))

    for field, grad in dstate._asdict().items():
        if field not in setting.paper.data:
            task[f"state.{field}"] = grad
    return {"task": task, "compression": compression}


def derivative(setting, loss, direction):
    """(loss(+h) - loss(-h)) / 2h along {name: direction} of parameters and fields of the state."""
    ends = []
    for step in (STEP, -STEP):
        params = dict(setting.params)
        shift = setting.shift
        for name, array in direction.items():
            if name in params:
                params[name] = params[name] + step * array
            else:
                field = name.removeprefix("state.")
                shift = shift._replace(**{field: getattr(shift, field) + step * array})
        losses, _ = forward(setting._replace(params=params, shift=shift))
        ends.append(losses[loss])
    return (ends[0] - ends[1]) / (2 * STEP)


@pytest.mark.parametrize("name", PAPERS)
def test_hand_written_gradients_are_finite_differences(name):
    """Of every parameter and of the first state, through two segments."""
    setting = random_setting(PAPERS[name])
    rng = np.random.default_rng(1)
    losses, caches = forward(setting)
    for loss, grads in backward(setting, caches).items():
        if losses[loss] == 0:
            continue  # the paper has no compression, or it has no loss of its own
        assert grads, f"{name}: nothing gets gradient from the {loss} loss"
        direction = {key: rng.standard_normal(grad.shape) for key, grad in grads.items()}
        by_hand = sum((grads[key] * direction[key]).sum() for key in grads)
        numeric = derivative(setting, loss, direction)
        print(f"\n{name:<40}{loss:<12} by hand {by_hand:+.9e}  differences {numeric:+.9e}", end="")
        if not abs(by_hand - numeric) <= TOLERANCE * abs(numeric):
            pytest.fail(f"{name}: {worst_number(setting, loss, grads, direction)}")


# ----------------------------------------------------------------------------
def random_setting(paper):
    """Random parameters, state and text. Numbers of a state are random, flags true, token ids 0."""
    ref = paper.reference
    config = ref.Config(**paper.sizes)
    rng = np.random.default_rng(0)
    params = ref.init_params(config, rng)
    params = {
        name: array + 0.2 * rng.standard_normal(array.shape) for name, array in params.items()
    }

    fields = []
    start = ref.initial_state(params, config, B)
    for field in start:
        if field.dtype == float:
            fields.append(rng.standard_normal(field.shape))
        else:
            fields.append(np.full_like(field, field.dtype == bool))
    shift = type(start)(*fields)

    text = rng.integers(config.vocabulary, size=(B, 2 * config.segment + 1))
    tokens = np.split(text[:, :-1], 2, axis=1)
    targets = np.split(text[:, 1:], 2, axis=1)
    return Setting(paper, config, params, shift, list(zip(tokens, targets, strict=True)))


def worst_number(setting, loss, grads, direction):
    """A sentence about the wrong gradient: the array, the place and both numbers."""
    apart = {}
    for name, grad in grads.items():
        by_hand = (grad * direction[name]).sum()
        apart[name] = abs(by_hand - derivative(setting, loss, {name: direction[name]}))
    name = max(apart, key=lambda key: np.nan_to_num(apart[key], nan=np.inf))

    grad = grads[name]
    numeric = np.empty(grad.shape)
    for at in np.ndindex(grad.shape):
        one = np.zeros(grad.shape)
        one[at] = 1.0
        numeric[at] = derivative(setting, loss, {name: one})
    at = np.unravel_index(np.abs(grad - numeric).argmax(), grad.shape)
    return (
        f"the {loss} loss's gradient by {name} at {[*map(int, at)]} is {grad[at]:.6g} by hand and "
        f"{numeric[at]:.6g} by differences. A backward function on the way there is not the "
        f"derivative of its forward: see python -m {setting.paper.reference.__name__} --check"
    )
