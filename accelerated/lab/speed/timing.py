"""The sizes and steps that the bench measures, and how it takes their time and memory: in turn, the machine is noisy."""

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.memformer import Memformer
from accelerated.memorizing import Memorizing
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.protocol import computing_in
from accelerated.replay import summed_nats
from accelerated.training.options import vocabulary_of
from accelerated.training.settings import TrainingConfig, preset_settings

PRESETS = {  # of the papers, the first of a model for a GPU
    "block_recurrent": ("paper", "bytes", "large", "arxiv", "github", "xl-512", "xl-1024", "xl-2048"),
    "compressive": ("wikitext-103", "enwik8", "pg19", "pg19-xl", "speech"),
    "memformer": ("wikitext-103", "decoder"), "memorizing": ("paper",),
    "pretrained_recurrence": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
}  # fmt: skip
SIZES = {  # without dropout
    "block_recurrent": BlockRecurrent.Config(
        width=256, layers=6, heads=4, head_width=64, feed_forward=1024, window=128, segment=1024, states=128,
        recurrent_layers=(4,), dropout=0.0,
    ),
    "compressive": Compressive.Config(
        width=256, layers=6, heads=4, head_width=64, feed_forward=1024, segment=256, memory=256, compressed_memory=64,
        compression_rate=4,
    ),
    "memorizing": Memorizing.Config(
        width=256, layers=6, heads=4, head_width=64, feed_forward=1024, segment=128, memory_layer=4, memory=2048, retrieved=32,
        dropout=0.0,
    ),
    "pretrained_recurrence": PretrainedRecurrence.Config(
        width=256, layers=6, heads=4, feed_forward=1024, max_positions=256, segment=128,
    ),
    "memformer": Memformer.Config(
        width=256, encoder_layers=3, decoder_layers=3, heads=4, head_width=64, feed_forward=1024, segment=64, slots=32,
    ),
}  # fmt: skip
# Segments in a training step
SEGMENTS = {"block_recurrent": 1, "compressive": 4, "memformer": 16, "memorizing": 8, "pretrained_recurrence": 4}
BATCH = {"block_recurrent": 4, "compressive": 4, "memformer": 8, "memorizing": 4, "pretrained_recurrence": 8}


def paper_settings(model: str, preset: str | None = None) -> tuple[Any, TrainingConfig]:
    """A preset's Config, with dropout and the vocabulary of its text, and its TrainingConfig; by default the first of PRESETS."""
    settings = preset_settings(model, preset or PRESETS[model][0])
    return replace(settings.model_config, vocabulary=vocabulary_of(settings.data)), settings.training


def config_for(model: str, device: torch.device) -> Any:
    """The Config to measure on a device."""
    return paper_settings(model)[0] if device.type == "cuda" else SIZES[model]


class Variant(NamedTuple):
    """A step to time, and its floating-point operations if they are counted."""

    name: str
    step: Callable[[], object]
    flops: float | None = None


def random_segments(vocabulary: int, length: int, batch: int, count: int, device: torch.device) -> list:
    """`count` consecutive segments (tokens, targets) of a random text, each (B, N)."""
    text = torch.randint(vocabulary, (batch, count * length + 1), device=device)
    return list(zip(text[:, :-1].split(length, 1), text[:, 1:].split(length, 1), strict=True))


def reader_of(model: torch.nn.Module) -> Callable:
    """How objective_of reads one of our models."""

    def read(tokens, targets, state):
        hidden, state, auxiliary = model.read(tokens, state)
        return summed_nats(hidden, model.output_matrix(), targets) / targets.numel(), state, auxiliary

    return read


def reader_of_peer(logits_of: Callable) -> Callable:
    """How objective_of reads a package's model; logits_of: (tokens, state) -> (logits, state, losses)."""

    def read(tokens, targets, state):
        logits, state, auxiliary = logits_of(tokens, state)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), state, auxiliary

    return read


def objective_of(read: Callable, segments: list, state: object) -> torch.Tensor:
    """The sum over segments [(tokens, targets)] of mean cross-entropy and auxiliary losses; the state is carried."""
    total = 0.0
    for tokens, targets in segments:
        nats, state, auxiliary = read(tokens, targets, state)
        total = total + nats + sum(auxiliary.values())
    return total


def computing(model: torch.nn.Module, options: Namespace) -> AbstractContextManager:
    """Inside, one of our models computes in --dtype."""
    return computing_in(model, getattr(torch, options.dtype))


def autocast(model: torch.nn.Module, options: Namespace) -> AbstractContextManager:
    """Inside, a package's model computes in --dtype: packages leave it to autocast."""
    return torch.autocast(options.device.type, dtype=torch.bfloat16, enabled=options.dtype == "bfloat16")


def training_step(
    model: torch.nn.Module, read: Callable, segments: list, state: object, options: Namespace, inside: Callable = computing
) -> Callable:
    """A step that computes a model's gradients; read: (tokens, targets, state) -> (mean cross-entropy, state, losses)."""

    def step():
        model.zero_grad()
        with inside(model, options):
            objective = objective_of(read, segments, state)
        objective.backward()

    return step


def counted_flops(step: Callable[[], object]) -> int:
    """FLOPs of the matrix products of one step."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one call."""
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    wait()
    begun = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begun


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 2048, repeats: int = 20) -> float:
    """FLOP/s of a square matrix product: the median of `repeats` after a warm-up."""
    size = size if device.type == "cpu" else 4 * size
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * size**3 / statistics.median(seconds(lambda: a @ b, device) for _ in range(repeats))


def peak_memory(step: Callable[[], object], device: torch.device) -> int:
    """Most bytes that the allocator held at once during the step, beyond those before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    held = peak = 0
    events = (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def time_in_turn(variants: list[Variant], repeats: int, device: torch.device, budget: float = math.inf) -> dict[str, list[float]]:
    """{name: [seconds of each repeat]}; the variants take turns, after two warm-up steps each.

    After `budget` seconds no further turn begins, so there may be fewer repeats, but at least one.
    """
    begun = time.perf_counter()
    for variant in variants:
        variant.step()
        variant.step()
    times = {variant.name: [] for variant in variants}
    for repeat in range(repeats):
        if repeat and time.perf_counter() - begun > budget:
            break
        for variant in variants:
            times[variant.name].append(seconds(variant.step, device))
    return times


def paired_ratios(first: list[float], second: list[float]) -> list[float]:
    """The ratios of the seconds of two variants that took turns, pair by pair."""
    return [a / b for a, b in zip(first, second, strict=True)]


def sizes_line(config: Any, batch: int) -> str:
    """The sizes of a config in one line, by their letters."""
    letters = {"D": "width", "L": "layers", "L encoder": "encoder_layers", "L decoder": "decoder_layers", "H": "heads"}
    letters |= {"E": "head_width", "F": "feed_forward", "N": "segment", "W": "window", "S": "states", "S slots": "slots"}
    letters |= {"M": "memory", "C": "compressed_memory", "c": "compression_rate"}
    sizes = [f"{letter} {getattr(config, field)}" for letter, field in letters.items() if hasattr(config, field)]
    return ", ".join([*sizes, f"B {batch}"])


def spread(values: list[float], form: str) -> str:
    """'median (least..most)' of measurements."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def print_table(*rows: tuple[str, ...]) -> None:
    """Print rows of cells as aligned columns, the first column to the left, the others to the right; row one is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print("   ".join((f"{first:<{widths[0]}}", *cells)), flush=True)
