"""Times steps and takes their memory: they take turns in one process, as the machine is noisy."""

import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from accelerated.lab.pages import markdown_table
from accelerated.lab.speed.variants import Variant


def large_product(device: torch.device, dtype: torch.dtype) -> Variant:
    """One large square matrix product: other steps reach its rate at best."""
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return Variant(lambda: a @ b, 2 * size**3)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begun


def peak_memory(step: Callable[[], object], device: torch.device) -> int:
    """Most bytes that the allocator held at once during the step, beyond those before it."""
    gc.collect()  # what is freed during the step would count against it
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profiler:
        step()
    # torch says neither that there is a profiler nor what an event has
    events = profiler.profiler.kineto_results.events()  # pyright: ignore
    events = [event for event in events if event.name() == "[memory]"]
    held = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore
        peak = max(peak, held)
    return peak


def time_in_turn(
    steps: dict[Any, Callable], repeats: int, device: torch.device
) -> dict[Any, list[float]]:
    """{name: [seconds of each repeat]} of {name: step}; they take turns after two warm-ups each."""
    for step in steps.values():
        step()
        step()
    times = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(seconds(step, device))
    return times


class Measured(NamedTuple):
    """What was measured of a variant."""

    seconds: list[float]  # of each turn
    peak: int  # bytes of a step
    flops: float | None  # of a step; None if they are unknown


def measured(makers: dict[str, Callable[[], Variant]], options: Namespace) -> dict[str, Measured]:
    """{name: what was measured} of each variant that `makers` make, timed in turn."""
    variants = {}
    peaks = {}
    for name, make in makers.items():
        variants[name] = make()
        step = variants[name].step
        if options.device.type == "cpu":
            step()
        # On a GPU of the first step: it records graphs, which keep their memory
        peaks[name] = peak_memory(step, options.device)
    steps = {name: variant.step for name, variant in variants.items()}
    times = time_in_turn(steps, options.repeats, options.device)
    return {name: Measured(times[name], peaks[name], variants[name].flops) for name in makers}


def print_measured(title: str, found: dict[str, Measured]) -> None:
    """Print a row of each variant; speed and memory are relative to the first one."""
    first = next(iter(found.values()))
    times = ("ms (least..most)", "speed, pair by pair")
    rows: list[tuple] = [(title, *times, "peak MB", "of the first's", "GFLOP/s")]
    for name, own in found.items():
        speed = spread(paired_ratios(first.seconds, own.seconds), ".3f")
        memory = f"{own.peak / first.peak:.2f}" if first.peak else "-"
        spent = spread([1e3 * each for each in own.seconds], ",.1f")
        rate = f"{own.flops / statistics.median(own.seconds) / 1e9:,.0f}" if own.flops else "-"
        rows.append((name, spent, speed, f"{own.peak / 1e6:,.1f}", memory, rate))
    print(f"{markdown_table(*rows)}\n", flush=True)


def paired_ratios(first: list[float], second: list[float]) -> list[float]:
    """The ratios of the seconds of two variants that took turns, pair by pair."""
    return [a / b for a, b in zip(first, second, strict=True)]


def spread(values: list[float], form: str) -> str:
    """'median (least..most)' of measurements."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"
