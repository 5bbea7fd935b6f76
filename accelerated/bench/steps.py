"""The table `steps`: a training step of a model, of its baseline and of its paper's public package.

Baselines: for block_recurrent, Slide with one more layer (equal cost in the paper); for compressive, a Transformer-XL that
attends to as many rows; for memformer with memory replay, full back-propagation; for pretrained_recurrence, plain GPT-2.
"""

import importlib.util
import statistics
from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch

from accelerated.bench import timing
from accelerated.bench.horizons import rollout_variant
from accelerated.bench.peers import PEERS
from accelerated.bench.sizes import SEGMENTS, sizes_line
from accelerated.bench.timing import Variant
from accelerated.models import MODELS


def training_flops(model_class: type, config: Any, batch: int, count: int) -> int:
    """FLOPs of the matrix products in forward and backward of `count` segments, counted on the plain path."""
    with torch.device("meta"):
        model = model_class(config).to("meta")
        tokens = torch.zeros(batch, config.segment, dtype=torch.long)
    segments, state = [(tokens, tokens)] * count, model.initial_state(batch)
    return timing.counted_flops(lambda: timing.objective_of(timing.reader_of(model), segments, state).backward())


def step_variant(name: str, config: Any, options: Namespace) -> Variant:
    """A training step of SEGMENTS[model] segments, from a state that has already read as many."""
    model_class, count, device = MODELS[options.model], SEGMENTS[options.model], options.device
    model = model_class(config).to(device)
    segments = timing.random_segments(config.vocabulary, config.segment, options.batch, count, device)
    state = model.initial_state(options.batch)
    with torch.no_grad():
        for tokens, _ in segments:
            state = model.advance(tokens, state)
    step = timing.training_step(model, timing.reader_of(model), segments, state, options)
    return Variant(name, step, training_flops(model_class, config, options.batch, count))


def with_baseline(model: str, config: Any) -> dict:
    """{name: config} of a model and its baseline."""
    if model == "block_recurrent":
        slide = replace(config, layers=config.layers + 1, recurrent_layers=())
        name = f"block-recurrent {config.layers}L {config.gate}:{config.configuration}"
        return {name: config, f"slide {slide.layers}L": slide}
    if model == "compressive":
        longer = replace(config, memory=config.memory + config.compressed_memory, compressed_memory=0)
        name = f"compressive {config.layers}L {config.compression}"
        return {name: config, f"transformer-xl {longer.layers}L, memory {longer.memory}": longer}
    return {f"GPT-2 {config.layers}L with recurrence": config, f"plain GPT-2 {config.layers}L": replace(config, vectors=0)}


def variants_of(options: Namespace) -> list[Variant]:
    """The model, its baseline and, if installed, its paper's package."""
    config = options.config
    if options.model == "memformer":
        model, title = MODELS["memformer"](config).to(options.device), f"{config.encoder_layers}+{config.decoder_layers}L"
        variants = []
        for method in ("memory_replay", "through_time"):
            variant = rollout_variant(f"memformer {title} {method}", model, method, SEGMENTS["memformer"], options)
            variants.append(variant._replace(flops=timing.counted_flops(variant.step)))
    else:
        variants = [step_variant(name, own, options) for name, own in with_baseline(options.model, config).items()]
    package, peer = PEERS[options.model]
    if importlib.util.find_spec(package):
        variants.append(peer(options))
    return variants


def report(options: Namespace) -> None:
    """Print a row for each variant, and the paired ratios of the first to the others; all steps read equally many tokens."""
    variants, dtype = variants_of(options), getattr(torch, options.dtype)
    rate = timing.matmul_rate(options.device, dtype)
    times = timing.time_in_turn(variants, options.repeats, options.device)
    rate = statistics.mean([rate, timing.matmul_rate(options.device, dtype)])  # before and after: the machine's speed drifts
    print(f"matrix products at {rate / 1e9:.0f} GFLOP/s; {sizes_line(options.config, options.batch)}")
    tokens = options.batch * options.config.segment * SEGMENTS[options.model]
    rows = [("variant", "ms a step", "tokens/s", "peak MB", "GFLOP/s", "of matmul")]
    for v in variants:
        median, peak = statistics.median(times[v.name]), timing.peak_memory(v.step, options.device) / 1e6
        flops = (f"{v.flops / median / 1e9:.0f}", f"{v.flops / median / rate:.1%}") if v.flops else ("-", "-")
        spent = timing.spread([1e3 * second for second in times[v.name]], ".0f")
        rows.append((v.name, spent, f"{tokens / median:,.0f}", f"{peak:.0f}", *flops))
    timing.print_table(*rows)
    for v in variants[1:]:
        ratios = timing.paired_ratios(times[variants[0].name], times[v.name])
        print(f"time of {variants[0].name} / {v.name}: {timing.spread(ratios, '.3f')}")
