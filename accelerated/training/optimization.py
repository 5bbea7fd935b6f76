"""Optimisers, learning rates, gradient clipping, and how gradients are computed.

train.py and lab/ use this file.
"""

import math
from collections.abc import Callable

import torch

from accelerated.attention.heads import HAS_TRITON, ParameterModule, with_fast_path
from accelerated.program.errors import InputError
from accelerated.protocol import CheckpointableLayer, Model
from accelerated.replay import BACKPROP, Result
from accelerated.training.settings import TrainingConfig

# Parameters of a model whose layers a GPU compiles by default: that takes 10 to 35 seconds
LARGE = 2 * 10**7


def learning_rate(step: int, training: TrainingConfig) -> float:
    """The learning rate of iteration `step`, counted from 1: a linear warm-up, then a schedule.

    Warm-up goes from training.initial_fraction of the peak, at step 0, to the peak, which is
    training.learning_rate. Then cosine falls to training.final_fraction of the peak at
    training.steps; constant stays at the peak. inverse_square_root (Block-Recurrent Transformer) is
    learning_rate / sqrt(max(step, warmup)), so its peak is learning_rate / sqrt(warmup).
    """
    peak = training.learning_rate
    warmed = min(1.0, step / max(1, training.warmup))
    warm = training.initial_fraction + (1 - training.initial_fraction) * warmed
    if training.schedule == "inverse_square_root":
        return peak * warm / math.sqrt(max(step, training.warmup, 1))
    if training.schedule == "constant" or step <= training.warmup:
        return peak * warm

    progress = (step - training.warmup) / max(1, training.steps - training.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (training.final_fraction + (1 - training.final_fraction) * cosine)


def update_due(step: int, training: TrainingConfig) -> bool:
    """Whether the parameters are updated after iteration `step`, counted from 1.

    They are after every iteration up to update_every_from, then after every update_every-th
    (Compressive Transformer, 5.5.1), and after the last.
    """
    late = step - training.update_every_from
    return late <= 0 or late % training.update_every == 0 or step == training.steps


def average_and_clip(model: Model, iterations: int, limit: float) -> torch.Tensor:
    """Divide the summed gradients by `iterations`, and clip their norm to `limit` (0: no limit).

    Parameters that only an auxiliary loss trains are clipped separately, so that neither objective
    shrinks the other's steps. Most models have none. Returns the norm of all gradients before
    clipping, a scalar on their device: nothing waits for it here.
    """
    of_auxiliary = model.auxiliary_parameters()
    apart = set(of_auxiliary)
    of_task = [parameter for parameter in model.parameters() if parameter not in apart]
    norms = [torch.zeros((), device=of_task[0].device)]
    for group in (of_task, of_auxiliary):
        gradients = [parameter.grad for parameter in group if parameter.grad is not None]
        if not gradients:
            continue
        if iterations > 1:
            for gradient in gradients:
                gradient.div_(iterations)
        norm = torch.nn.utils.get_total_norm(gradients)
        if limit:
            torch.nn.utils.clip_grads_with_norm_(group, limit, norm)
        norms.append(norm)
    return torch.linalg.vector_norm(torch.stack(norms))


class AveragedAdafactor(torch.optim.Adafactor):
    """torch's Adafactor with momentum: subtracts a running average of its updates, as optax does.

    The Block-Recurrent Transformer's authors train so (decision 15).
    """

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """average = 0.9 average + 0.1 update, and parameter -= average."""
        parameters = []
        for group in self.param_groups:
            parameters += [each for each in group["params"] if each.grad is not None]
        before = [parameter.clone() for parameter in parameters]
        super().step(closure)
        for parameter, value in zip(parameters, before, strict=True):
            state = self.state[parameter]
            if "average" not in state:
                state["average"] = torch.zeros_like(value)
            state["average"].lerp_(value - parameter, 0.1)
            parameter.copy_(value - state["average"])


ADAFACTORS = {"adafactor": torch.optim.Adafactor, "adafactor_momentum": AveragedAdafactor}


def make_optimizer(model: torch.nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """The optimiser; weight decay acts on parameters of two or more axes, not on vectors."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rate = training.learning_rate
    if training.optimizer in ADAFACTORS:
        # torch's own first epsilon, 1.2e-7, outweighs small squared gradients; the paper's, 1e-30,
        # gives NaN for a row of zeros
        return ADAFACTORS[training.optimizer](groups, lr=rate, eps=(1e-15, 1e-3))
    if training.optimizer == "adam":
        return torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.999), fused=True)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def check_finite(step: int, values: dict[str, float]) -> None:
    """Raise InputError, which stops the run, if one of {name: value} is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise InputError(
                f"the {name} is {value} at step {step}; "
                "what was saved before stays; try a lower --learning-rate"
            )


@with_fast_path
def backprop_of(model: Model, training: TrainingConfig) -> Callable[..., Result]:
    """How the model's gradients are computed, as --backprop says; --compile may make it faster.

    Sets the model's layers as --checkpoint-layers and --compile say.
    """
    compiles = compiles_methods(training, model)
    for module in model.modules():
        if isinstance(module, CheckpointableLayer):
            module.checkpointed = training.checkpoint_layers
            module.preserves_rng = model.config.dropout > 0
        if isinstance(module, ParameterModule):
            module.compiled = compiles
    return BACKPROP[training.backprop]


def compiles_methods(training: TrainingConfig, model: Model) -> bool:
    """Whether compilable methods are compiled: if asked for, and on a GPU in a large model."""
    if training.compile != "auto":
        return training.compile == "inductor"
    is_large = count_parameters(model) >= LARGE
    return model.embedding.device.type == "cuda" and HAS_TRITON and is_large


def count_parameters(model: Model) -> int:
    """How many numbers a model trains."""
    return sum(parameter.numel() for parameter in model.parameters())
