"""python -m reference.<paper>: gradients are checked, and a tiny model learns a text by heart.

Then it reads the text's last segment without parts of its state. gradients.py calls this.
"""

from collections.abc import Iterator
from types import ModuleType

import numpy as np

from reference.rollout import Segment, rollout_backward, rollout_forward

LANES = 2
SEGMENTS = 4
SHOWN = (1, 10, 50, 100)  # steps whose loss is printed; the last one is the last


def demonstrate(reference: ModuleType, config: object) -> None:
    """Learn random tokens by heart, and print what each part of the state is worth."""
    rng = np.random.default_rng(0)
    params = reference.init_params(config, rng)
    segments = random_segments(config, rng)
    first_state = reference.initial_state(params, config, LANES)
    for step in range(1, SHOWN[-1] + 1):
        rows, caches, _ = rollout_forward(reference, params, config, segments, first_state)
        grads, _ = rollout_backward(reference, params, config, caches)
        if step in SHOWN:
            losses = [rows[f"{k}/loss"] for k in range(SEGMENTS)]
            print(f"step {step:3d}: {bits(sum(losses), segments):.3f} bits per token")
        rate = 0.02 * 0.98**step
        params = {name: params[name] - rate * np.sign(grad) for name, grad in grads.items()}

    *before, last = segments
    _, _, state = rollout_forward(reference, params, config, before, first_state)
    fresh = reference.initial_state(params, config, LANES)
    for label, read in cleared(state, fresh):
        rows, _, _ = rollout_forward(reference, params, config, [last], read)
        print(f"last segment, {label}: {bits(rows['0/loss'], [last]):.3f} bits per token")


def random_segments(config: object, rng: np.random.Generator) -> list:
    """Segments of random tokens, of which each is the target of the one before it."""
    n = config.segment
    text = rng.integers(config.vocabulary, size=(LANES, SEGMENTS * n + 1))
    scored = np.ones((LANES, n), bool)
    segments = []
    for begin in range(0, SEGMENTS * n, n):
        tokens = text[:, begin : begin + n]
        targets = text[:, begin + 1 : begin + n + 1]
        segments.append(Segment(tokens, targets, scored, np.full(LANES, begin == 0)))
    return segments


def bits(loss: float, segments: list) -> float:
    """Bits per token of a loss in nats."""
    tokens = sum(segment.tokens.size for segment in segments)
    return loss / tokens / np.log(2)


def cleared(state: tuple, fresh: tuple) -> Iterator[tuple[str, tuple]]:
    """(words, state) of the state as it is, without each of its fields, and of a document's."""
    yield "state carried", state
    for name in state._fields:
        yield f"{name} cleared", state._replace(**{name: getattr(fresh, name)})
    yield "all cleared", fresh
