"""A model of some sizes, and a step of it over random text, for all tables of the bench.

The sizes stand in accelerated/presets/<model>.py, whose BENCHMARK has

    sizes      fields of the Config that is measured on a CPU
    preset     of the paper's sizes, which is measured on a GPU, if there is one
    small      fields that are smaller if a model is compared with a CPU: in a large one rounding
               may cross a ReLU's kink
    segments   of a step
    lanes      of a batch, on a CPU and on a GPU
    backprop   the method of a step, if it is not through_time
    baseline   a name, and a function from the Config to the fields that the baseline changes
    horizons   of the table horizons, if they are not HORIZONS
    replayed   the models of the table horizons, {name: fields that they change}, if it is not the
               model itself
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from accelerated.data.lanes import Segment
from accelerated.models import NAMES, model_class, presets_of
from accelerated.protocol import Model, computing_in
from accelerated.replay import BACKPROP, Result
from accelerated.training.optimization import backprop_of
from accelerated.training.options import vocabulary_of
from accelerated.training.settings import TrainingConfig, preset_settings

MEASURED = tuple(name for name in NAMES if hasattr(presets_of(name), "BENCHMARK"))


class Variant(NamedTuple):
    """A step to time, and the FLOPs of its matrix products if they are known."""

    step: Callable[[], object]
    flops: float | None = None


def config_of(model: str, preset: str) -> Any:
    """A preset's Config, with dropout and the vocabulary of its text."""
    settings = preset_settings(model, preset)
    return replace(settings.model_config, vocabulary=vocabulary_of(settings.data))


def sizes_on(device: torch.device, model: str) -> dict[str, Any]:
    """The options `config` and `batch` of a model's step on a device."""
    facts = presets_of(model).BENCHMARK
    config = presets_of(model).Config(**facts["sizes"])
    if device.type == "cuda" and "preset" in facts:
        config = config_of(model, facts["preset"])
    return {"config": config, "batch": facts["lanes"][device.type]}


def model_on_meta(name: str, config: Any) -> Model:
    """A model in training mode without numbers."""
    with torch.device("meta"):
        return model_class(name)(config)


def rollout(
    model: Model, backprop: Callable[..., Result], horizon: int, options: Namespace
) -> Variant:
    """One rollout of a model over random text, in mid-document. Gradients stay allocated."""
    batch = options.batch
    size = model.config.segment
    dtype = getattr(torch, options.dtype)

    # A word is about as frequent as 1 / its rank, as in a text
    even = torch.rand(batch, horizon * size + 1, dtype=torch.float64)
    text = ((model.config.vocabulary + 1) ** even).long() - 1
    tokens = text[:, :-1].split(size, 1)  # (B, N) of each segment
    targets = text[:, 1:].split(size, 1)
    scored = torch.ones(batch, size, dtype=torch.bool)
    starts = torch.zeros(batch, dtype=torch.bool)
    segments = [
        Segment(*pair, scored, starts).to(options.device)
        for pair in zip(tokens, targets, strict=True)
    ]
    with torch.no_grad(), computing_in(model, dtype):
        state = model.initial_state(batch)
        for segment in segments:
            state = model.advance(segment.tokens, state)

    def step():
        model.zero_grad(set_to_none=False)
        with computing_in(model, dtype):
            backprop(model, segments, state, batch * horizon * size)

    return Variant(step)


def prepared_step(model: Model, training: TrainingConfig, options: Namespace) -> Variant:
    """A rollout of a model as train.py prepares it."""
    return rollout(model, backprop_of(model, training), training.horizon, options)


def meta_step(
    model: str, config: Any, segments: int, lanes: int = 1, method: str = "through_time"
) -> Callable[[], object]:
    """A rollout of a model on the meta device, in bfloat16: it has shapes but no numbers."""
    options = Namespace(device=torch.device("meta"), batch=lanes, dtype="bfloat16")
    return rollout(model_on_meta(model, config), BACKPROP[method], segments, options).step
