"""The table `counts`: what a step at the papers' sizes costs on a GPU, counted without one.

Tensors are on the meta device: they have shapes but no numbers, and they take a GPU's branches,
except for our own kernels: SDPA and a softmax stand for them, and nothing is compiled. A test fails
if the counts grow.

    kernels  operations that are dispatched, except views and allocations
    saved    bytes kept for the backward pass, beside parameters and the incoming state
    peak     most bytes that exist at once, beside parameters and the incoming state
    FLOPs    of the products of matrices, attention included
"""

import weakref
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from accelerated.lab.speed.timing import print_table
from accelerated.lab.speed.variants import (
    MEASURED,
    model_on_meta,
    paper_settings,
    prepared_step,
    rollout,
)
from accelerated.models import presets_of
from accelerated.protocol import Model, computing_in
from accelerated.replay import BACKPROP
from accelerated.training.settings import TrainingConfig

META = torch.device("meta")
aten = torch.ops.aten
# beginnings of what starts no kernel
NOTHING = ("detach", "prim", "sym_")
ALLOCATIONS = ("empty", "new_empty", "_unsafe_view", "lift", "promote_types")


def memory_efficient_attention(
    query, key, value, offset=None, dropout=0.0, causal=False, scale=None
) -> Tensor:
    """SDPA by a GPU's memory-efficient kernel.

    Flash, which a GPU takes without an offset, reads and saves the same.
    """
    if offset is not None:
        if offset.dtype == torch.bool:
            offset = torch.where(offset, 0.0, -torch.inf)
        offset = offset.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    attend = aten._scaled_dot_product_efficient_attention
    saves = query.requires_grad
    return attend(query, key, value, offset, saves, dropout, causal, scale=scale)[0]


def native_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout by a GPU's kernel, which saves a byte for each number."""
    return aten.native_dropout(x, p, True)[0] if training and p else x


def rms_norm(
    x: Tensor, shape: tuple, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """A stand-in for a GPU's fused kernel: layer norm's reads, writes and saves as much."""
    return aten.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]


class Dispatched(TorchDispatchMode):
    """Counts what is dispatched inside; all numbers are in bytes except FLOPs."""

    flops = 0
    saved_bytes = 0
    live = 0
    peak = 0

    def __init__(self):
        super().__init__()
        self.names = []
        # {storage: its bytes, 0 as soon as they are saved}
        self.memory = WeakIdKeyDictionary(ref_type=weakref.ref)  # pyright: ignore  # torch's type

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        out = function(*arguments, **options)
        name = str(function).removeprefix("aten.")
        starts_nothing = function.is_view or name.startswith(NOTHING)
        if function.namespace != "aten" or starts_nothing:
            return out

        self.allocate((arguments, options), out)
        if not name.startswith(ALLOCATIONS):
            self.names.append(name)
        flops_of = flop_registry.get(function.overloadpacket)
        if flops_of:
            self.flops += flops_of(*arguments, **options, out_val=out)
        return out

    def allocate(self, given: Any, out: Any) -> None:
        """Add the memory of what is written, unless it is that of an older tensor."""
        known = {id(leaf.untyped_storage()) for leaf in tensors_in(given)}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage in self.memory or id(storage) in known:
                continue
            size = storage.nbytes()
            self.memory[storage] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.live -= size

    def keep(self, tensor: Tensor) -> Tensor:
        """The pack hook of saved tensors.

        Memory that was there before, parameters' and state's, is not counted.
        """
        storage = tensor.untyped_storage()
        if storage in self.memory:
            self.saved_bytes += self.memory[storage]
            self.memory[storage] = 0
        return tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of what an operation is given or returns."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def meta_step(
    model: str, config: Any, segments: int, lanes: int = 1, method: str = "through_time"
) -> Callable[[], object]:
    """A rollout of a model on the meta device, in bfloat16."""
    options = Namespace(device=META, batch=lanes, dtype="bfloat16")
    return rollout(model_on_meta(model, config), BACKPROP[method], segments, options).step


def counted(step: Callable[[], object]) -> Dispatched:
    """What a step on the meta device dispatches, by the kernels that a GPU chooses.

    The meta device's own are several small ones.

    Functions are replaced, and no TorchFunctionMode is entered: a checkpointed layer is computed
    again outside of its reach.
    """
    dispatched = Dispatched()
    hooks = torch.autograd.graph.saved_tensors_hooks(dispatched.keep, lambda tensor: tensor)
    kernels = {
        "scaled_dot_product_attention": memory_efficient_attention,
        "dropout": native_dropout,
        "rms_norm": rms_norm,
    }
    with dispatched, hooks, patch.multiple(functional, **kernels):
        step()
    return dispatched


def products(step: Callable[[], object]) -> int:
    """The FLOPs of a step's matrix products, attention written out with N x K scores.

    The meta device writes SDPA out itself.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def state_bytes(network: Model, lanes: int) -> int:
    """The bytes of the states of so many lanes."""
    return sum(field.nbytes for field in network.initial_state(lanes))


def held_bytes(network: Model, training: TrainingConfig) -> int:
    """The bytes of parameters and their copies, gradients and what the optimiser keeps."""
    parameters = list(network.parameters())
    weights = sum(p.nbytes for p in parameters)
    copies = weights // 2 if training.dtype == "bfloat16" else 0
    moments = 2 * weights
    if training.optimizer.startswith("adafactor"):  # sums of rows and columns
        moments = 4 * sum(sum(p.shape) if p.dim() > 1 else p.numel() for p in parameters)
    if training.optimizer == "adafactor_momentum":  # the average, and a copy in a step
        moments += 2 * weights
    return 2 * weights + copies + moments


def training_bytes(model: str, config: Any, training: TrainingConfig) -> tuple[int, int]:
    """(held_bytes and all lanes' states; most besides in one group of lanes).

    The second is of a rollout by the preset's back-propagation, with batch / accumulate lanes. Of a
    long horizon with stored states only the states are added.
    """
    network = model_on_meta(model, config)
    for parameter in network.parameters():
        parameter.grad = torch.empty_like(parameter)
    with computing_in(network, getattr(torch, training.dtype)):
        state = state_bytes(network, training.batch)

    lanes = training.batch // training.accumulate
    options = Namespace(device=META, batch=lanes, dtype=training.dtype)
    horizon = training.horizon
    if training.backprop != "through_time":
        horizon = min(horizon, 4)
    variant = prepared_step(network, replace(training, horizon=horizon), options)
    stored = (training.horizon - horizon) * state // training.accumulate
    return held_bytes(network, training) + state, counted(variant.step).peak + stored


def print_steps() -> None:
    """Print a row of counts for each model."""
    rows = [("one lane", "kernels", "saved MB", "peak MB", "TFLOP")]
    for model in MEASURED:
        config, _ = paper_settings(model)
        step = counted(meta_step(model, config, presets_of(model).BENCHMARK["segments"]))
        saved, peak = (f"{size / 1e6:,.0f}" for size in (step.saved_bytes, step.peak))
        rows.append((model, f"{len(step.names):,}", saved, peak, f"{step.flops / 1e12:.2f}"))
    print_table(*rows)


def print_presets() -> None:
    """Print the memory that each preset takes."""
    how = ("dtype", "batch", "accumulate", "horizon", "backprop")
    rows: list[tuple] = [("preset", *how, "GB held", "GB of a group", "GB")]
    for model in MEASURED:
        for preset in presets_of(model).BENCHMARK["presets"]:
            config, training = paper_settings(model, preset)
            held, group = training_bytes(model, config, training)
            gigabytes = [f"{size / 1e9:.1f}" for size in (held, group, held + group)]
            fields = [getattr(training, field) for field in how]
            rows.append((f"{model} {preset}", *fields, *gigabytes))
    print_table(*rows)
