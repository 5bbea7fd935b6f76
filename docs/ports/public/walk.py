"""Walks through a public package's computation, tensor by tensor, beside ours (docs/public.md).

An adapter's steps() yields (name, theirs, ours): a tensor of the package, and what our reference
computes from what the package had before it. So each tensor is judged by itself, and no difference
hides a later one.
"""

import sys
from collections import defaultdict
from importlib import metadata

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from reference.compressive import split_heads

TOLERANCE = 1e-4  # relative, in float32; norms have an epsilon of 1e-5, ours of 1e-6
HEADS = 8  # the packages' default


class Calls(TorchFunctionMode):
    """What functions of torch return inside a `with`: {function: [array]}, in order."""

    def __init__(self):
        super().__init__()
        self.outputs = defaultdict(list)

    def __torch_function__(self, function, types, arguments=(), options=None):
        """Calls the function, and keeps what it returned."""
        out = function(*arguments, **(options or {}))
        if function.__name__ in ("linear", "layer_norm", "einsum", "softmax"):
            self.outputs[function.__name__].append(out.numpy().copy())
        return out


def parameters(model):
    """{name: array} of a model, whose biases become zero first: most of ours have none."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    return {name: parameter.numpy() for name, parameter in model.named_parameters()}


def halves(projected):
    """Keys and values (B, H, N, E), from both in one (B, N, 2HE)."""
    return (split_heads(half, HEADS) for half in np.split(projected, 2, axis=-1))


def difference(theirs, ours):
    """Whether two tensors differ, and by how much, in words."""
    theirs = np.asarray(theirs)
    ours = np.asarray(ours)
    if theirs.shape != ours.shape:
        return True, f"shape {theirs.shape}, ours {ours.shape}"
    error = abs(theirs - ours).max() / (abs(ours).max() or 1)
    return not error <= TOLERANCE, f"{error:.1e}"


@torch.no_grad()
def main(package, release, steps):
    """Print how a package's tensors compare with ours; the exit code, 2 if it cannot be run."""
    torch.manual_seed(0)
    try:
        found = metadata.version(package)
        rows = [(name, *difference(theirs, ours)) for name, theirs, ours in steps()]
    except ImportError as error:
        found = f"cannot be imported ({error})"
    if found != release:
        advice = f"pip install {package}=={release}, in an environment of its own"
        print(f"{package} {found}; the adapter is for {release}: {advice}", file=sys.stderr)
        return 2

    wrong = [name for name, differs, _ in rows if differs]
    print(f"{package} {release}: {len(rows) - len(wrong)} of {len(rows)} tensors agree")
    print(f"  begin with {wrong[0]}, the first that differs")
    for name, differs, words in rows:
        print(f"  {name:<36} {words}{'  differs' * differs}")
    return 0
