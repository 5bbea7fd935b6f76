"""The table `counts`: kernels, casts, bytes and FLOPs of a training step at the papers' sizes on a GPU, counted without one.

Tensors are on the meta device: they have shapes but no numbers, and they take a GPU's branches. A test fails if the counts grow.

    kernels  operations that are dispatched, except views and allocations
    casts    those of them that only change a type
    saved    bytes kept for the backward pass, beside parameters and the incoming state
    moved    bytes of the tensors that all kernels read and write
    peak     most bytes that exist at once, beside parameters and the incoming state
    FLOPs    of the products of matrices, attention included
"""

import math
import weakref
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from accelerated.lab.speed.horizons import rollout_variant
from accelerated.lab.speed.timing import PRESETS, SEGMENTS, objective_of, paper_settings, print_table, reader_of
from accelerated.models import model_class
from accelerated.protocol import computing_in, detach
from accelerated.training.run import recompute_layers

aten = torch.ops.aten
ALLOCATIONS = ("empty", "new_empty", "_unsafe_view", "lift", "promote_types")  # beginnings of what starts no kernel
LOOKUPS = ("embedding.", "index.", "gather.", "nll_loss_forward")  # beginnings of what reads no more of a tensor than it writes


def memory_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offset: torch.Tensor | None = None, dropout: float = 0.0,
    causal: bool = False, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """SDPA by a GPU's memory-efficient kernel; flash, which a GPU takes without an offset, reads and saves the same."""
    if offset is not None:
        offset = torch.where(offset, 0.0, -torch.inf) if offset.dtype == torch.bool else offset
        offset = offset.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    attend = aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, offset, query.requires_grad, dropout, causal, scale=scale)[0]


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offset: torch.Tensor | None = None, dropout: float = 0.0,
    causal: bool = False, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same with N x K scores, as the plain paths have them."""
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-1, -2)
    if causal:
        offset = scores.new_empty(scores.shape[-2:], dtype=torch.bool)
    if offset is not None:
        scores = scores.masked_fill(offset, -torch.inf) if offset.dtype == torch.bool else scores + offset
    return native_dropout(scores.softmax(-1), dropout) @ value


def native_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout by a GPU's kernel, which saves a byte for each number."""
    return aten.native_dropout(x, p, True)[0] if training and p else x


def rms_norm(x: torch.Tensor, shape: tuple, weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
    """A stand-in for a GPU's fused kernel: layer norm's reads, writes and saves as much."""
    return aten.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]


def as_on_a_gpu(attention: Callable = memory_efficient) -> AbstractContextManager:
    """Inside, meta tensors take the kernels that a GPU chooses; the meta device itself would take several small ones.

    Functions are replaced, and no TorchFunctionMode is entered: a checkpointed layer is computed again outside of its reach.
    """
    return patch.multiple(functional, scaled_dot_product_attention=attention, dropout=native_dropout, rms_norm=rms_norm)


class Memory(NamedTuple):
    """A piece of memory and the operation that filled it."""

    number: int
    bytes: int
    operation: str
    shape: tuple


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes that a kernel reads of a tensor: less than its size if it is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class Dispatched(TorchDispatchMode):
    """Counts what is dispatched inside; all numbers are in bytes except FLOPs."""

    def __init__(self):
        super().__init__()
        self.names, self.casts, self.flops, self.live, self.peak, self.pieces = [], 0, 0, 0, 0, 0
        self.moved, self.saved = Counter(), {}  # {operation: bytes}, {number: Memory}
        self.memory = WeakIdKeyDictionary(ref_type=weakref.ref)  # {storage: Memory}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        name = str(function).removeprefix("aten.")
        if function.namespace != "aten" or function.is_view or name.startswith(("detach", "prim", "sym_")):
            return out
        reads, writes = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in ((arguments, options), out))
        there = {id(x.untyped_storage()) for x in reads}
        for tensor in writes:
            if tensor.untyped_storage() in self.memory or id(tensor.untyped_storage()) not in there:  # otherwise an older one
                self.note(tensor, name)
        if not name.startswith(ALLOCATIONS):
            self.names.append(name)
            self.casts += name.startswith("_to_copy") or ("copy_" in name and len({x.dtype for x in reads}) > 1)
            written = sum(map(tensor_bytes, writes))
            most = written if name.startswith(LOOKUPS) else math.inf
            self.moved[name] += written + sum(min(most, tensor_bytes(x)) for x in reads)
            if function.overloadpacket in flop_registry:
                self.flops += flop_registry[function.overloadpacket](*arguments, **(options or {}), out_val=out)
        return out

    def note(self, tensor: torch.Tensor, name: str) -> None:
        """Count a new tensor's memory until it is freed."""
        storage = tensor.untyped_storage()
        if storage in self.memory:
            if self.memory[storage].operation.startswith(ALLOCATIONS):
                self.memory[storage] = self.memory[storage]._replace(operation=name)
            return
        size = storage.nbytes()
        self.memory[storage] = Memory(self.pieces, size, name, tuple(tensor.shape))
        self.pieces, self.live = self.pieces + 1, self.live + size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.live -= size

    def given(self, *tensors: torch.Tensor) -> None:
        """Do not count the memory of these tensors among what is saved."""
        for tensor in tensors:
            self.memory.pop(tensor.untyped_storage(), None)

    @property
    def saved_bytes(self) -> int:
        return sum(piece.bytes for piece in self.saved.values())

    @property
    def moved_bytes(self) -> int:
        return sum(self.moved.values())

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pack hook of saved tensors. Memory that was there before, parameters' and state's, is not counted."""
        own = self.memory.get(tensor.untyped_storage())
        if own is not None:
            self.saved[own.number] = own
        return tensor


class NoNumbers(np.random.Generator):
    """In place of a seed: initial values that are not drawn, because the meta device would drop them."""

    def __init__(self):
        super().__init__(np.random.PCG64(0))

    def standard_normal(self, size: tuple | int) -> np.ndarray:
        return np.broadcast_to(np.float32(0), size)

    def normal(self, mean: float, deviation: float, size: tuple | int) -> np.ndarray:
        return self.standard_normal(size)


def model_on_meta(name: str, config: Any) -> torch.nn.Module:
    """A model in training mode without numbers."""
    with torch.device("meta"):
        return model_class(name)(config, seed=NoNumbers())


def random_model(name: str, config: Any, device: torch.device) -> torch.nn.Module:
    """A model in training mode with weights that are drawn on the device, where it is fast: for measuring only."""
    network = model_class(name)(config, seed=NoNumbers()).to(device)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return network


def counted_step(
    model: str, config: Any, segments: int, lanes: int = 1, attention: Callable = memory_efficient,
    dtype: torch.dtype = torch.bfloat16,
) -> Dispatched:  # fmt: skip
    """What forward and backward of `segments` segments dispatch, with gradient through the state between them."""
    network = model_on_meta(model, config)
    tokens = torch.empty(lanes, config.segment, dtype=torch.long, device="meta")
    with Dispatched() as dispatched, as_on_a_gpu(attention), computing_in(network, dtype):
        dispatched.given(*network.parameters(), *network.buffers())
        with torch.autograd.graph.saved_tensors_hooks(dispatched.keep, lambda tensor: tensor):
            state = detach(network.initial_state(lanes))
            objective_of(reader_of(network), [(tokens, tokens)] * segments, state).backward()
    return dispatched


def optimizer_bytes(network: torch.nn.Module, optimizer: str) -> int:
    """The bytes of an optimiser's state: two moments of each parameter, or Adafactor's sums of rows and columns."""
    if optimizer != "adafactor":
        return sum(8 * p.numel() for p in network.parameters())
    return sum(4 * (sum(p.shape) if p.dim() > 1 else p.numel()) for p in network.parameters())


def training_bytes(model: str, config: Any, training: Any) -> tuple[int, int]:
    """(bytes of parameters, gradients, optimiser and all lanes' states; most bytes beside them in one group of lanes).

    The second is of a rollout by the preset's back-propagation, with batch / accumulate lanes. Of a long horizon with stored
    states only the states are added.
    """
    network = model_on_meta(model, config)
    if training.checkpoint_layers:
        recompute_layers(network)
    for parameter in network.parameters():
        parameter.grad = torch.empty_like(parameter)
    with computing_in(network, getattr(torch, training.dtype)):
        state = sum(field.numel() * field.element_size() for field in network.initial_state(training.batch))
    held = sum(8 * p.numel() for p in network.parameters()) + optimizer_bytes(network, training.optimizer) + state
    lanes = Namespace(device=torch.device("meta"), batch=training.batch // training.accumulate, dtype=training.dtype)
    horizon = training.horizon if training.backprop == "through_time" else min(training.horizon, 4)
    rollout = rollout_variant("", network, training.backprop, horizon, lanes)
    with Dispatched() as dispatched, as_on_a_gpu():
        rollout.step()
    return held, dispatched.peak + (training.horizon - horizon) * state // training.accumulate


def report(options: Namespace) -> None:
    """Print a row of counts for each model, with scores written out in a second row, then the memory that each preset takes."""
    rows = [("model, lane of one", "kernels", "casts", "saved MB", "moved GB", "peak MB", "TFLOP")]
    for model, count in SEGMENTS.items():
        config, _ = paper_settings(model)
        for name, attention in ((model, memory_efficient), ("  its scores written out", written_out)):
            found = counted_step(model, config, count, attention=attention)
            sizes = (f"{found.saved_bytes / 1e6:,.0f}", f"{found.moved_bytes / 1e9:.1f}", f"{found.peak / 1e6:,.0f}")
            rows.append((name, f"{len(found.names):,}", f"{found.casts:,}", *sizes, f"{found.flops / 1e12:.2f}"))
    print_table(*rows)
    rows = [("preset", "type", "lanes", "accumulate", "horizon", "method", "GB held", "GB of a group", "GB")]
    for model, preset in ((model, preset) for model, presets in PRESETS.items() for preset in presets):
        config, training = paper_settings(model, preset)
        parts = training_bytes(model, config, training)
        how = (training.dtype, f"{training.batch}", f"{training.accumulate}", f"{training.horizon}", training.backprop)
        rows.append((f"{model} {preset}", *how, *(f"{size / 1e9:.1f}" for size in (*parts, sum(parts)))))
    print_table(*rows)
