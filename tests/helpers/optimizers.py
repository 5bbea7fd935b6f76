"""One step of gradient descent and of AdamW, in NumPy: the vectors have them, tests too."""

from collections.abc import Container

import numpy as np

SGD_RATE = 0.1
# AdamW's epsilon is not smaller, so that what should be zero and was rounded stays small
ADAMW = {"rate": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "decay": 0.1}


def sgd(params: dict, grads: dict) -> dict:
    """The parameters after one step of plain gradient descent."""
    return {name: value - SGD_RATE * grads[name] for name, value in params.items()}


def norm_of(arrays) -> float:
    """The norm of all arrays together."""
    return np.sqrt(sum((array**2).sum() for array in arrays))


def clipped(grads: dict, limit: float, apart: Container[str]) -> dict:
    """The gradients with a norm of at most `limit`; those of the names in `apart` by themselves."""
    after = {}
    for is_apart in (False, True):
        group = {name: grad for name, grad in grads.items() if (name in apart) == is_apart}
        factor = min(1.0, limit / (norm_of(group.values()) + 1e-6))
        after |= {name: grad * factor for name, grad in group.items()}
    return after


def adamw(
    params: dict, grads: dict, moments: dict, step: int, settings: dict = ADAMW
) -> tuple[dict, dict]:
    """Parameters and {name: (first, second moment)} after step `step`, from 1; all decay."""
    rate, beta1, beta2, epsilon, decay = settings.values()
    new_params = {}
    new_moments = dict(moments)  # those of other parameters stay
    for name, value in params.items():
        first, second = moments.get(name, (0.0, 0.0))
        first = beta1 * first + (1 - beta1) * grads[name]
        second = beta2 * second + (1 - beta2) * grads[name] ** 2
        direction = first / (1 - beta1**step)
        scale = np.sqrt(second / (1 - beta2**step)) + epsilon
        new_params[name] = value - rate * (direction / scale + decay * value)
        new_moments[name] = (first, second)
    return new_params, new_moments
