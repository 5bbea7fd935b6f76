"""python -m reference.<paper>: a tiny model learns random tokens by heart.

Then it reads the last segment without parts of its state. gradients.py calls this.
"""

from types import ModuleType
from typing import Any

import numpy as np

from reference.rollout import Segment, rollout_backward, rollout_forward

LANES = 2
SEGMENTS = 4
SHOWN = (1, 10, 50, 100)  # steps whose loss is printed; the last one is the last


def demonstrate(reference: ModuleType, config: Any) -> None:
    """Learn random tokens by heart, and print what each part of the state is worth."""
    rng = np.random.default_rng(0)
    params = reference.init_params(config, rng)
    initial = reference.initial_state(params, config, LANES)
    segments = []
    for k in range(SEGMENTS):
        tokens, targets = rng.integers(config.vocabulary, size=(2, LANES, config.segment))
        starts = np.full(LANES, k == 0)
        segments.append(Segment(tokens, targets, np.ones(tokens.shape, bool), starts))
    one_bit = LANES * config.segment * np.log(2)  # for each token of a segment
    for step in range(1, SHOWN[-1] + 1):
        rows, caches, _ = rollout_forward(reference, params, config, segments, initial)
        grads, _ = rollout_backward(reference, params, config, caches)
        if step in SHOWN:
            loss = sum(rows[f"{k}/loss"] for k in range(SEGMENTS)) / SEGMENTS
            print(f"step {step:3d}: {loss / one_bit:.3f} bits per token")
        rate = 0.02 * 0.98**step
        params = {name: params[name] - rate * np.sign(grad) for name, grad in grads.items()}

    *before, last = segments
    _, _, state = rollout_forward(reference, params, config, before, initial)
    fresh = reference.initial_state(params, config, LANES)
    parts = {name: state._replace(**{name: getattr(fresh, name)}) for name in state._fields}
    for cleared, read in ({"nothing": state} | parts | {"all": fresh}).items():
        rows, _, _ = rollout_forward(reference, params, config, [last], read)
        print(f"last segment, {cleared} cleared: {rows['0/loss'] / one_bit:.3f} bits per token")
