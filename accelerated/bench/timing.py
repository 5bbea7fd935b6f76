"""Measures the time and memory of steps for the bench; steps take turns, because the machine is noisy."""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from accelerated.replay import summed_nats
from accelerated.training.process import autocast


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


def training_step(model: torch.nn.Module, read: Callable, segments: list, state: object, options: Namespace) -> Callable:
    """A step that computes a model's gradients; read: (tokens, targets, state) -> (mean cross-entropy, state, losses)."""

    def step():
        model.zero_grad()
        with autocast(options.dtype, options.device):
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
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    synchronize(device)
    begun = time.perf_counter()
    function()
    synchronize(device)
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


def time_in_turn(variants: list[Variant], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """{name: [seconds of each repeat]}; the variants take turns, after two warm-up steps each."""
    for variant in variants:
        variant.step()
        variant.step()
    times = {variant.name: [] for variant in variants}
    for _ in range(repeats):
        for variant in variants:
            times[variant.name].append(seconds(variant.step, device))
    return times


def paired_ratios(first: list[float], second: list[float]) -> list[float]:
    """The ratios of the seconds of two variants that took turns, pair by pair."""
    return [a / b for a, b in zip(first, second, strict=True)]


def spread(values: list[float], form: str) -> str:
    """'median (least..most)' of measurements."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def print_table(*rows: tuple[str, ...]) -> None:
    """Print rows of cells as aligned columns, the first column to the left, the others to the right; row one is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print("   ".join((f"{first:<{widths[0]}}", *cells)), flush=True)
