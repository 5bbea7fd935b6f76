"""The backward passes in reference/ are written by hand. Finite differences show that they are the derivatives.

For every paper: the summed loss of two segments, of which the second reads the state that the first leaves. All parameters and
the incoming state move together along a random direction, by a small step h either way. Then (loss(+h) - loss(-h)) / 2h must be
the product of gradient and direction, and one wrong number in any gradient would show. `pytest -s` prints both as a table.
What a paper cuts from the gradient is data, and stands still: the losses of the compression move the compression alone.
"""

import numpy as np
import pytest

from reference import block_recurrent, compressive, memformer, memorizing, pretrained_recurrence

B, STEP, TOLERANCE = (
    3,
    1e-7,
    1e-6,
)  # lanes (documents side by side), h, and the largest relative error; NumPy's float64
SIZES = {
    "vocabulary": 13,
    "width": 8,
    "heads": 2,
    "feed_forward": 7,
}  # no two are equal, so that no axis is taken for another
BLOCKS = SIZES | {
    "head_width": 5,
    "layers": 3,
    "window": 4,
    "segment": 12,
    "states": 6,
    "recurrent_layers": (2,),
}
ROWS = SIZES | {
    "head_width": 5,
    "layers": 3,
    "segment": 6,
    "memory": 9,
    "compressed_memory": 4,
    "compression_rate": 3,
}
SLOTS = SIZES | {
    "head_width": 5,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "segment": 4,
    "slots": 6,
}
GPT = SIZES | {"layers": 3, "segment": 6, "max_positions": 9, "module_width": 5}
KEYS = SIZES | {"head_width": 5, "layers": 3, "segment": 4, "memory": 6, "retrieved": 3}
LSTM = {"gate": "lstm", "configuration": "dual", "feedback": True}
PAPERS = {  # the reference, its sizes, and the fields of the state that are data
    "Block-Recurrent, fixed gate": (block_recurrent, BLOCKS, ()),
    "Block-Recurrent, LSTM gates, feedback": (block_recurrent, BLOCKS | LSTM, ()),
    "Compressive, attention reconstruction": (compressive, ROWS, ("memory", "compressed")),
    "Compressive, auto-encoding": (
        compressive,
        ROWS | {"compression_loss": "auto_encoding"},
        ("memory", "compressed"),
    ),
    "Compressive, trained by BPTT": (compressive, ROWS | {"compression_loss": "bptt"}, ("memory",)),
    "Memformer": (memformer, SLOTS, ("previous",)),
    "Memformer, decoder-only": (memformer, SLOTS | {"encoder_layers": 0}, ("previous",)),
    "Recurrence in GPT-2": (pretrained_recurrence, GPT, ("present",)),
    "Recurrence in GPT-2, two vectors": (
        pretrained_recurrence,
        GPT | {"vectors": 2, "pooling": "attention"},
        ("present",),
    ),
    "Memorizing": (memorizing, KEYS, ("memory_keys", "memory_values")),
}


def run(reference, config, params, shift, segments, data):
    """Read segments from the initial state + shift: [task loss, compression losses], and by hand {name: gradient} of each."""
    losses, caches, task, compression, dstate = np.zeros(2), [], {}, {}, None
    state = type(shift)(
        *(a + b for a, b in zip(reference.initial_state(params, config, B), shift, strict=True))
    )
    for tokens, targets in segments:
        logits, state, cache = reference.forward(params, config, tokens, state)
        nats, loss_cache = reference.cross_entropy_forward(
            logits, targets, np.ones(targets.shape, bool)
        )
        named, auxiliary_cache = (
            reference.auxiliary_forward(params, config, cache)
            if reference is compressive
            else ({}, [])
        )
        losses += nats, sum(named.values())
        caches.append((cache, loss_cache, auxiliary_cache))
        state = state._replace(
            **{field: getattr(shift, field) for field in data}
        )  # a constant: the paper cuts its gradient
    for cache, loss_cache, auxiliary_cache in reversed(caches):
        dlogits = reference.cross_entropy_backward(1.0, loss_cache)
        dparams, dstate = reference.backward(params, config, cache, dlogits, dstate)
        reference.add_into(task, dparams)
        reference.add_into(
            compression,
            reference.auxiliary_backward(config, 1.0, auxiliary_cache) if auxiliary_cache else {},
        )
    if hasattr(reference, "initial_state_backward"):  # Block-Recurrent and Memformer learn it
        reference.add_into(task, reference.initial_state_backward(config, dstate))
    return losses, (task | dstate._asdict(), compression)


@pytest.mark.parametrize("paper", PAPERS)
def test_hand_written_gradients_are_finite_differences(paper):
    reference, sizes, data = PAPERS[paper]
    config, rng = reference.Config(**sizes), np.random.default_rng(0)
    params = {
        name: value + 0.2 * rng.standard_normal(value.shape)
        for name, value in reference.init_params(config, rng).items()
    }
    like, n = (
        reference.initial_state(params, config, B),
        config.segment,
    )  # numbers become random, flags true, token ids 0
    shift = type(like)(
        *(
            rng.standard_normal(x.shape) if x.dtype == float else np.full_like(x, x.dtype == bool)
            for x in like
        )
    )
    text = rng.integers(config.vocabulary, size=(B, 2 * n + 1))
    segments = [(text[:, at : at + n], text[:, at + 1 : at + n + 1]) for at in (0, n)]
    losses, gradients = run(reference, config, params, shift, segments, data)
    for which in np.flatnonzero(losses):  # 0: the task's; 1: the compression's, where there is one
        grads = gradients[which]
        step = {
            name: STEP * rng.standard_normal(grad.shape)
            for name, grad in grads.items()
            if name not in data
        }
        ends = []
        for sign in (1, -1):
            moved, state = (
                {k: x + sign * step.get(k, 0) for k, x in tree.items()}
                for tree in (params, shift._asdict())
            )
            ends.append(
                run(reference, config, moved, type(shift)(**state), segments, data)[0][which]
            )
        numeric, by_hand = (
            (ends[0] - ends[1]) / 2 / STEP,
            sum((grads[name] * step[name]).sum() for name in step) / STEP,
        )
        print(
            f"\n{paper:<40}{('task', 'compression')[which]:<12} by hand {by_hand:+.9e}  differences {numeric:+.9e}",
            end="",
        )
        assert step and abs(by_hand - numeric) <= TOLERANCE * abs(numeric)
