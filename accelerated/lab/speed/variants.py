"""What the bench measures: a model of some sizes and a step of it, which is a rollout over random text. The other tables use it.

The sizes stand in accelerated/presets/<model>.py, whose SPEED has

    sizes      fields of the Config that is measured on a CPU; on a GPU it is the Config of the first of `presets`
    small      fields that are smaller where a model is compared with a CPU: in a large one rounding may cross a ReLU's kink
    segments   of a step
    lanes      of a batch, on a CPU and on a GPU
    presets    of the papers' sizes
    backprop   the method of a step, if it is not through_time
    baseline   a name, and a function from the Config to the fields that the baseline changes
    horizons   of the table horizons, if they are not HORIZONS
    replayed   the models of the table horizons, {name: fields that they change}, if it is not the model itself
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerated.data.lanes import Segment
from accelerated.models import model_class, presets_of
from accelerated.protocol import computing_in
from accelerated.replay import BACKPROP
from accelerated.training.options import vocabulary_of
from accelerated.training.settings import TrainingConfig, preset_settings


class Variant(NamedTuple):
    """A step to time, and the FLOPs of its matrix products if they are known."""

    step: Callable[[], object]
    flops: float | None = None


def paper_settings(model: str, preset: str = "") -> tuple[Any, TrainingConfig]:
    """A preset's Config, with dropout and the vocabulary of its text, and its TrainingConfig; by default of the first preset."""
    settings = preset_settings(model, preset or presets_of(model).SPEED["presets"][0])
    return replace(
        settings.model_config, vocabulary=vocabulary_of(settings.data)
    ), settings.training


def options_of(model: str, device: torch.device, dtype: str) -> Namespace:
    """What is measured of a model: its Config on a device, the lanes of a batch, the device and the type."""
    facts, on_a_gpu = presets_of(model), device.type == "cuda"
    config = paper_settings(model)[0] if on_a_gpu else facts.Config(**facts.SPEED["sizes"])
    lanes = facts.SPEED["lanes"]["cuda" if on_a_gpu else "cpu"]
    return Namespace(model=model, config=config, batch=lanes, device=device, dtype=dtype)


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


def rollout(
    model: Any, method: str, horizon: int, options: Namespace, trained: Any = None
) -> Variant:
    """One rollout of a model, or of its TrainedModel, over random text, in mid-document. Gradients stay allocated."""
    batch, size, dtype = options.batch, model.config.segment, getattr(torch, options.dtype)
    text = torch.randint(model.config.vocabulary, (batch, horizon * size + 1))
    pairs = zip(text[:, :-1].split(size, 1), text[:, 1:].split(size, 1), strict=True)
    scored, never = torch.ones(batch, size, dtype=torch.bool), torch.zeros(batch, dtype=torch.bool)
    segments = [
        Segment(tokens, targets, scored, never).to(options.device) for tokens, targets in pairs
    ]
    with torch.no_grad(), computing_in(model, dtype):
        state = model.initial_state(batch)
        for segment in segments:
            state = model.advance(segment.tokens, state)

    def step():
        model.zero_grad(set_to_none=False)
        with computing_in(model, dtype):
            BACKPROP[method](trained or model, segments, state, text[:, 1:].numel())

    return Variant(step)
