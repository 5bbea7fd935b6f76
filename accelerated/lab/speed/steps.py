"""The tables of what a training step takes, and a generated token."""

import textwrap
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerated.generation.any_model import stepper_of
from accelerated.generation.continuation import Sampling, drawn_tokens, read_prompt
from accelerated.lab.speed.timing import large_product, measured, print_measured
from accelerated.lab.speed.variants import Variant, config_of, meta_step, prepared_step
from accelerated.models import model_class, presets_of
from accelerated.protocol import Model
from accelerated.replay import BACKPROP
from accelerated.training.settings import TrainingConfig

HORIZONS = (1, 2, 4, 8, 16, 32)  # segments of a rollout in the table `horizons`
POSITIONS = (1_000, 100_000)  # tokens before those that `generation` times
TOKENS = 200  # timed together


def step_variant(config: Any, method: str, options: Namespace) -> Variant:
    """A training step of our model, with its plain path's FLOPs.

    The meta device writes SDPA out as products, with N x K scores.
    """
    segments = presets_of(options.model).BENCHMARK["segments"]
    network = model_class(options.model)(config).to(options.device)
    training = TrainingConfig(backprop=method, horizon=segments)
    with FlopCounterMode(display=False) as counter:
        meta_step(options.model, config, segments, options.batch, method)()
    step = prepared_step(network, training, options)
    return step._replace(flops=counter.get_total_flops())


def report_steps(options: Namespace) -> None:
    """Print a row for a model, for its baselines and for a large product.

    The models' steps read equally many tokens.
    """
    model = options.model
    config = options.config
    facts = presets_of(model).BENCHMARK
    method = facts.get("backprop", "through_time")
    kinds = {model: (config, method)}
    if method != "through_time":
        kinds["the same through_time"] = (config, "through_time")
    if "baseline" in facts:
        name, changes = facts["baseline"]
        kinds[name] = (replace(config, **changes(config)), method)

    makers = {name: partial(step_variant, *kind, options) for name, kind in kinds.items()}
    dtype = getattr(torch, options.dtype)
    makers["one large product"] = partial(large_product, options.device, dtype)
    title = f"{facts['segments']} segments of {options.batch} lanes: {model}, {config}"
    print(textwrap.fill(title, 118), end="\n\n")
    print_measured("a step of", measured(makers, options))


def report_horizons(options: Namespace) -> None:
    """Print a table for each horizon (Memformer, Table 3), relative to full BPTT."""
    facts = presets_of(options.model).BENCHMARK
    for title, changes in facts.get("replayed", {options.model: {}}).items():
        config = replace(options.config, **changes)
        network = model_class(options.model)(config).to(options.device)
        state = network.initial_state(options.batch)
        megabytes = sum(field.nbytes for field in state) / 1e6
        print(f"{title}, {options.batch} lanes; a stored state is {megabytes:.2f} MB\n")
        for horizon in options.horizons or facts.get("horizons", HORIZONS):
            makers = {}
            for way in BACKPROP:
                training = TrainingConfig(backprop=way, horizon=horizon)
                makers[way] = partial(prepared_step, network, training, options)
            print_measured(f"horizon {horizon}", measured(makers, options))


def continuation(network: Model, position: int, options: Namespace) -> Variant:
    """TOKENS tokens after a text of so many, drawn one by one."""
    generator = torch.Generator(options.device).manual_seed(0)
    vocabulary = network.config.vocabulary
    text = torch.randint(vocabulary, (1, position), generator=generator, device=options.device)
    start = read_prompt(stepper_of(network, capture=False), text)
    stepper = stepper_of(network)

    @torch.no_grad()
    def draw() -> None:
        list(drawn_tokens(*start, TOKENS, Sampling(0.8), generator, stepper.step))

    return Variant(draw)


def report_generation(options: Namespace) -> None:
    """Print what TOKENS tokens take after texts of both lengths; on a CPU by preset tiny."""
    device = options.device
    config = options.config if device.type == "cuda" else config_of(options.model, "tiny")
    network = model_class(options.model)(config).to(device, getattr(torch, options.dtype)).eval()
    makers = {f"after {n:,}": partial(continuation, network, n, options) for n in POSITIONS}
    print_measured(f"{options.model}, {TOKENS} tokens", measured(makers, options))
