"""Optimisers, learning-rate schedules, gradient clipping, and the model as training computes it. train.py and lab/ use it."""

import math
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

from accelerated.program.errors import InputError
from accelerated.protocol import Recomputable
from accelerated.training.settings import TrainingConfig


def learning_rate(step: int, training: TrainingConfig) -> float:
    """The learning rate of iteration `step`, counted from 1: linear warm-up to the peak, training.learning_rate, then a schedule.

    Warm-up starts at training.initial_fraction of the peak at step 0. cosine falls to training.final_fraction of the peak at
    training.steps. inverse_square_root (Block-Recurrent Transformer) is learning_rate / sqrt(max(step, warmup)), so its peak is
    learning_rate / sqrt(warmup). constant stays at the peak.
    """
    warm = training.initial_fraction + (1 - training.initial_fraction) * min(
        1.0, step / max(1, training.warmup)
    )
    if training.schedule == "inverse_square_root":
        return training.learning_rate * warm / math.sqrt(max(step, training.warmup, 1))
    if training.schedule == "constant" or step <= training.warmup:
        return training.learning_rate * warm
    progress = min(1.0, (step - training.warmup) / max(1, training.steps - training.warmup))
    fraction = training.final_fraction + (1 - training.final_fraction) * 0.5 * (
        1 + math.cos(math.pi * progress)
    )
    return training.learning_rate * fraction


def update_due(step: int, training: TrainingConfig) -> bool:
    """Whether the parameters are updated after iteration `step`, counted from 1.

    They are: after every iteration up to update_every_from, then after every update_every-th (Compressive Transformer, 5.5.1),
    and after the last.
    """
    late = step - training.update_every_from
    return late <= 0 or late % training.update_every == 0 or step == training.steps


def average_and_clip(model: torch.nn.Module, iterations: int, limit: float) -> torch.Tensor:
    """Divide the summed gradients by `iterations` and clip their norm to `limit` (0: no clipping); returns the norm before it.

    Parameters that only an auxiliary loss trains are clipped separately, so that neither objective shrinks the other's steps.
    Most models have no auxiliary loss, so that group may have no gradients. The returned norm is of both groups together, a
    scalar on their device: nothing waits for it here.
    """
    norms = [torch.zeros((), device=next(model.parameters()).device)]
    apart = set(model.auxiliary_parameters())
    for group in (
        [p for p in model.parameters() if (p in apart) is is_apart] for is_apart in (False, True)
    ):
        gradients = [p.grad for p in group if p.grad is not None]
        if not gradients:
            continue
        if iterations > 1:
            torch._foreach_div_(gradients, iterations)
        norms.append(torch.nn.utils.get_total_norm(gradients))
        if limit:
            torch.nn.utils.clip_grads_with_norm_(group, limit, norms[-1])
    return torch.linalg.vector_norm(torch.stack(norms))


def make_optimizer(model: torch.nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """The optimiser; weight decay acts on parameters of two or more axes, not on vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if training.optimizer == "adafactor":
        # torch's own first epsilon, 1.2e-7, outweighs small squared gradients; the paper's, 1e-30, gives NaN for a row of zeros
        return torch.optim.Adafactor(groups, lr=training.learning_rate, eps=(1e-15, 1e-3))
    kind, beta2 = (
        (torch.optim.Adam, 0.999) if training.optimizer == "adam" else (torch.optim.AdamW, 0.99)
    )
    return kind(groups, lr=training.learning_rate, betas=(0.9, beta2), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def check_finite(step: int, values: dict[str, float]) -> None:
    """Raise InputError, which stops the run, if one of {name: value} is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise InputError(
                f"the {name} is {value} at step {step}; what was saved before stays; try a lower --learning-rate"
            )


class TrainedModel:
    """What back-propagation calls of a model, compiled as --compile says. Evaluation and generation call the model itself.

    It also tells the layers --checkpoint-layers, which matters only where gradients are computed.
    """

    def __init__(self, model: torch.nn.Module, training: TrainingConfig):
        self.initial_state, self.output_matrix = model.initial_state, model.output_matrix
        self.read, self.advance = model.read, model.advance
        for layer in (module for module in model.modules() if isinstance(module, Recomputable)):
            layer.recomputed, layer.drops = training.checkpoint_layers, model.config.dropout > 0
        if training.compile == "none":
            return
        # Both passes of memory replay must drop the same. Compiled code then draws its random numbers as uncompiled code does,
        # which is slower than its own generator
        replays, graphs = training.backprop == "memory_replay", training.compile == "cudagraphs"
        torch._inductor.config.fallback_random = replays
        for parameter in (
            model.parameters() if graphs else ()
        ):  # or .grad is the graph's result, which its next run overwrites
            parameter.register_hook(lambda gradient: None if gradient is None else gradient.clone())
        self.read = compiled(self.read, graphs)
        if replays:
            self.advance = compiled(self.advance, graphs)


def compiled(function: Callable, graphs: bool) -> Callable:
    """The function, compiled as one graph.

    It is compiled at most three times, all in the first two iterations: for a state with gradient, for one without, and for one
    in which a document starts. A CUDA graph writes its next results where it wrote the last ones, so its results are copied.
    """
    graph = torch.compile(
        function, fullgraph=True, dynamic=False, mode="reduce-overhead" if graphs else None
    )
    return (lambda *given: tree_map(torch.clone, graph(*given))) if graphs else graph
