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
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from accelerated.lab.speed.timing import print_table
from accelerated.lab.speed.variants import model_on_meta, paper_settings, rollout
from accelerated.models import NAMES, presets_of
from accelerated.protocol import computing_in
from accelerated.training.optimization import TrainedModel
from accelerated.training.settings import TrainingConfig

aten, META = torch.ops.aten, torch.device("meta")
ALLOCATIONS = (
    "empty",
    "new_empty",
    "_unsafe_view",
    "lift",
    "promote_types",
)  # beginnings of what starts no kernel
LOOKUPS = (
    "embedding.",
    "index.",
    "gather.",
    "nll_loss_forward",
)  # beginnings of what reads no more of a tensor than it writes


def kernel(written_out: bool) -> Callable:
    """SDPA by a GPU's memory-efficient kernel, or written out with N x K scores, as the plain paths have them.

    Flash, which a GPU takes without an offset, reads and saves the same as the memory-efficient one.
    """

    def plain(query, key, value, offset=None, dropout=0.0, causal=False, scale=None):
        scores = (
            query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-1, -2)
        )
        if causal:
            offset = scores.new_empty(scores.shape[-2:], dtype=torch.bool)
        if offset is not None:
            scores = (
                scores.masked_fill(offset, -torch.inf)
                if offset.dtype == torch.bool
                else scores + offset
            )
        return native_dropout(scores.softmax(-1), dropout) @ value

    def memory_efficient(query, key, value, offset=None, dropout=0.0, causal=False, scale=None):
        if offset is not None:
            offset = torch.where(offset, 0.0, -torch.inf) if offset.dtype == torch.bool else offset
            offset = offset.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        attend = aten._scaled_dot_product_efficient_attention
        return attend(query, key, value, offset, query.requires_grad, dropout, causal, scale=scale)[
            0
        ]

    return plain if written_out else memory_efficient


def native_dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Dropout by a GPU's kernel, which saves a byte for each number."""
    return aten.native_dropout(x, p, True)[0] if training and p else x


def rms_norm(
    x: torch.Tensor, shape: tuple, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """A stand-in for a GPU's fused kernel: layer norm's reads, writes and saves as much."""
    return aten.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes that a kernel reads of a tensor: less than its size if it is expanded, or if places overlap."""
    different = math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
    )
    return min(different * tensor.element_size(), tensor.untyped_storage().nbytes())


class Dispatched(TorchDispatchMode):
    """Counts what is dispatched inside; all numbers are in bytes except FLOPs."""

    def __init__(self):
        super().__init__()
        self.names, self.casts, self.flops, self.moved_bytes, self.live, self.peak = (
            [],
            0,
            0,
            0,
            0,
            0,
        )
        self.saved_bytes = 0
        self.memory = WeakIdKeyDictionary(
            ref_type=weakref.ref
        )  # {storage: its bytes, and whether they are saved}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        name = str(function).removeprefix("aten.")
        if (
            function.namespace != "aten"
            or function.is_view
            or name.startswith(("detach", "prim", "sym_"))
        ):
            return out
        reads, writes = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for tree in ((arguments, options), out)
        )
        there = {
            id(x.untyped_storage()) for x in reads
        }  # what is written into an older tensor takes no memory
        for storage in (tensor.untyped_storage() for tensor in writes):
            if storage not in self.memory and id(storage) not in there:
                self.memory[storage] = SimpleNamespace(bytes=storage.nbytes(), saved=False)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage.nbytes())
        if not name.startswith(ALLOCATIONS):
            self.names.append(name)
            self.casts += name.startswith("_to_copy") or (
                "copy_" in name and len({x.dtype for x in reads}) > 1
            )
            written = sum(map(tensor_bytes, writes))
            most = written if name.startswith(LOOKUPS) else math.inf
            self.moved_bytes += written + sum(min(most, tensor_bytes(x)) for x in reads)
            if function.overloadpacket in flop_registry:
                self.flops += flop_registry[function.overloadpacket](
                    *arguments, **(options or {}), out_val=out
                )
        return out

    def free(self, size: int) -> None:
        self.live -= size

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pack hook of saved tensors. Memory that was there before, parameters' and state's, is not counted."""
        piece = self.memory.get(tensor.untyped_storage())
        if piece is not None and not piece.saved:
            piece.saved = True
            self.saved_bytes += piece.bytes
        return tensor


def meta_step(
    model: str, config: Any, segments: int, lanes: int = 1, method: str = "through_time"
) -> Callable[[], object]:
    """A rollout of a model on the meta device, in bfloat16."""
    options = Namespace(device=META, batch=lanes, dtype="bfloat16")
    return rollout(model_on_meta(model, config), method, segments, options).step


def counted(step: Callable[[], object], written_out: bool = False) -> Dispatched:
    """What a step on the meta device dispatches, by the kernels that a GPU chooses; the meta device's own are several small ones.

    Functions are replaced, and no TorchFunctionMode is entered: a checkpointed layer is computed again outside of its reach.
    """
    dispatched = Dispatched()
    hooks = torch.autograd.graph.saved_tensors_hooks(dispatched.keep, lambda tensor: tensor)
    kernels = {
        "scaled_dot_product_attention": kernel(written_out),
        "dropout": native_dropout,
        "rms_norm": rms_norm,
    }
    with dispatched, hooks, patch.multiple(functional, **kernels):
        step()
    return dispatched


def training_bytes(model: str, config: Any, training: TrainingConfig) -> tuple[int, int]:
    """(bytes of parameters and their copies, gradients, optimiser, all lanes' states; most besides in one group of lanes).

    The second is of a rollout by the preset's back-propagation, with batch / accumulate lanes. Of a long horizon with stored
    states only the states are added.
    """
    network = model_on_meta(model, config)
    for parameter in network.parameters():
        parameter.grad = torch.empty_like(parameter)
    with computing_in(network, getattr(torch, training.dtype)):
        state = sum(
            field.numel() * field.element_size() for field in network.initial_state(training.batch)
        )
    sums = [
        sum(p.shape) if p.dim() > 1 else p.numel() for p in network.parameters()
    ]  # Adafactor's, of rows and columns
    parameters = 4 * sum(p.numel() for p in network.parameters())
    copies = parameters // 2 if training.dtype == "bfloat16" else 0
    held = (
        2 * parameters
        + copies
        + (4 * sum(sums) if training.optimizer == "adafactor" else 2 * parameters)
        + state
    )
    options = Namespace(
        device=META, batch=training.batch // training.accumulate, dtype=training.dtype
    )
    horizon = training.horizon if training.backprop == "through_time" else min(training.horizon, 4)
    variant = rollout(network, training.backprop, horizon, options, TrainedModel(network, training))
    return held, counted(variant.step).peak + (
        training.horizon - horizon
    ) * state // training.accumulate


def report(options: Namespace) -> None:
    """Print a row of counts for each model, with scores written out in a second row, then the memory that each preset takes."""
    rows = [("one lane", "kernels", "casts", "saved MB", "moved GB", "peak MB", "TFLOP")]
    for model in NAMES:
        for name, plain in ((model, False), ("its scores written out", True)):
            counts = counted(
                meta_step(model, paper_settings(model)[0], presets_of(model).SPEED["segments"]),
                plain,
            )
            sizes = (
                f"{counts.saved_bytes / 1e6:,.0f}",
                f"{counts.moved_bytes / 1e9:.1f}",
                f"{counts.peak / 1e6:,.0f}",
            )
            rows.append(
                (
                    name,
                    f"{len(counts.names):,}",
                    f"{counts.casts:,}",
                    *sizes,
                    f"{counts.flops / 1e12:.2f}",
                )
            )
    print_table(*rows)
    rows = [
        (
            "preset",
            "type",
            "lanes",
            "accumulate",
            "horizon",
            "method",
            "GB held",
            "GB of a group",
            "GB",
        )
    ]
    for model in NAMES:
        for preset in presets_of(model).SPEED["presets"]:
            config, training = paper_settings(model, preset)
            parts = training_bytes(model, config, training)
            how = (
                training.dtype,
                training.batch,
                training.accumulate,
                training.horizon,
                training.backprop,
            )
            rows.append(
                (f"{model} {preset}", *how, *(f"{size / 1e9:.1f}" for size in (*parts, sum(parts))))
            )
    print_table(*rows)
