"""Timing steps against each other on a noisy machine, and the memory that they take."""

import statistics
import time
from typing import NamedTuple

import torch


class Variant(NamedTuple):
    """A training step to time: forward and backward of a batch, and the multiplications and additions it is worth."""

    name: str
    step: object
    tokens: int
    flops: float | None


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function, device):
    synchronize(device)
    begun = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begun


def matmul_rate(device, dtype, size=2048, repeats=20):
    """FLOP/s of a square matrix product, the median of repeats after a warm-up."""
    size = size if device.type == "cpu" else 4 * size
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * size**3 / statistics.median(seconds(lambda: a @ b, device) for _ in range(repeats))


def peak_memory(step, device):
    """Bytes that the allocator held at once beyond what it held before the step."""
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


def time_in_turn(variants, repeats, device):
    """{name: [seconds of each repeat]}, the variants taking turns after two steps each that do not count."""
    for variant in variants:
        variant.step()
        variant.step()
    times = {variant.name: [] for variant in variants}
    for _ in range(repeats):
        for variant in variants:
            times[variant.name].append(seconds(variant.step, device))
    return times


def paired_ratios(first, second):
    """Of the seconds of two variants that took turns, sorted: the middle one is the median of the pairs."""
    return sorted(a / b for a, b in zip(first, second, strict=True))
