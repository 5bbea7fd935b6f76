"""Who is to blame if NumPy and PyTorch differ: called by tests that have failed already.

Each function of the reference is checked by itself, against finite differences. If all are right,
PyTorch's modules follow, in the order of computation: the first whose result NumPy never computes.
"""

import contextlib
import sys
from functools import partial

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from reference.gradients import (
    TOLERANCE,
    Calls,
    Case,
    errors_of,
    gradients_of,
    guilty,
    leaves,
    modules_of,
)
from reference.rollout import rollout_forward
from tests.helpers.comparison import as_array


@contextlib.contextmanager
def blaming(setting, segments, read):
    """Say first where to look if the block fails. `read` reads the segments by PyTorch."""
    try:
        yield
    except AssertionError as error:
        is_gradient = any("gradient of" in line for line in str(error).splitlines()[:2])
        accused = culprit(setting, segments, read, is_gradient)
        raise AssertionError(f"{accused}\n{error}") from None


def culprit(setting, segments, read, is_gradient) -> str:
    """Which side is wrong, and where to look."""
    case = Case(*setting[:4], segments)
    calls = Calls(setting.reference)
    try:
        errors = errors_of(case, gradients_of(case, calls), np.random.default_rng(0))
    except Exception as error:
        return f"NumPy's backward pass is wrong, it raises {type(error).__name__}: {error}"
    if not all(error <= TOLERANCE for error in errors.values()):
        names = [f"{calls.places[name][0]}.{name}" for name in guilty(case, calls)]
        return f"NumPy is wrong: look at {' or '.join(names)}, and the forward function beside it"
    alike = "each backward function of NumPy is its forward function's derivative"
    if is_gradient:
        return f"PyTorch is wrong, as {alike}: look for what is detached, or is not and should be"
    module = first_of_its_own(setting, segments, read)
    return (
        f"the first of PyTorch's results that NumPy has not is that of {module}; look at it, or at "
        f"what the reference has for it, though {alike}"
    )


def first_of_its_own(setting, segments, read) -> str:
    """Where PyTorch first computes rows which NumPy never computes: in a module, or before it."""
    known = rows_computed(setting, segments)
    model = setting.model
    found = []

    def has_others(nest):
        for array in filter(torch.is_tensor, tree_leaves(nest)):
            sums = as_array(array).sum(-1).ravel()
            after = np.searchsorted(known, sums)
            neighbours = known[np.clip([after - 1, after], 0, len(known) - 1)]
            if (np.abs(neighbours - sums).min(0) > 1e-9 * (1 + np.abs(sums))).any():
                return True
        return False

    def watch(name, module, given, result):
        if not has_others(result):
            return
        holder, _, part = name.rpartition(".")
        if has_others(given[:1]):
            found.append(f"{named(model.get_submodule(holder))}, in its {part} or before")
        else:
            found.append(named(module))

    def named(module):
        return f"{type(module).__module__}.{type(module).__qualname__}"

    hooks = []
    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_hook(partial(watch, name)))
    try:
        read(setting, segments)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "what its modules' results are given to: states, logits, losses"


def rows_computed(setting, segments) -> np.ndarray:
    """The sums, in order, of all rows (last axes) that NumPy's functions return."""
    files = {module.__file__ for module in modules_of(setting.reference)}
    known = []

    def notice(frame, event, result):
        if event == "return" and frame.f_code.co_filename in files:
            for _, array in leaves(result):
                known.append(np.atleast_1d(array).sum(-1).ravel())

    sys.setprofile(notice)
    try:
        rollout_forward(setting.reference, setting.params, setting.config, segments, setting.state)
    finally:
        sys.setprofile(None)
    return np.sort(np.concatenate(known))
