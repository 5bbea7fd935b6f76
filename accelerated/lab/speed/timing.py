"""How the bench takes the time and the memory of steps: they take turns in one process, because the machine is noisy."""

import gc
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from accelerated.lab.speed.variants import Variant

COLUMNS = (
    "ms (least..most)",
    "speed, pair by pair",
    "peak MB",
    "of the first's",
    "GFLOP/s",
    "turns",
)


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
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()  # what is freed during the step would count against it
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    held = peak = 0
    events = (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def time_in_turn(
    steps: dict[Any, Callable], repeats: int, device: torch.device, budget: float = math.inf
) -> dict:
    """{name: [seconds of each repeat]} of {name: step}; the steps take turns, after two warm-ups each.

    After `budget` seconds no further turn begins, so there may be fewer repeats, but at least one.
    """
    begun = time.perf_counter()
    for step in steps.values():
        step()
        step()
    times = {name: [] for name in steps}
    for repeat in range(repeats):
        if repeat and time.perf_counter() - begun > budget:
            break
        for name, step in steps.items():
            times[name].append(seconds(step, device))
    return times


def measured_rows(makers: dict[str, Callable[[], Variant]], options: Namespace) -> list[tuple]:
    """A row (name, *COLUMNS) of each variant that `makers` make, timed in turn for options.seconds at most.

    Speed and memory are relative to the first variant. One that fails, while it is made or while it runs, has an error in its
    row and does not end the others.
    """
    deadline, steps, flops, peaks, errors = time.perf_counter() + options.seconds, {}, {}, {}, {}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        """What a call of a variant returns; None if the variant has failed, or fails now."""
        try:
            return None if name in errors else call()
        except Exception as error:
            errors[name] = first_line(error)
        gc.collect()  # what the failed one held
        torch.cuda.empty_cache()

    for name, make in makers.items():
        if time.perf_counter() > deadline:
            errors[name] = "no time was left"
        elif variant := attempt(name, make):
            steps[name], flops[name] = partial(attempt, name, variant.step), variant.flops
            steps[name]()
            peaks[name] = peak_memory(steps[name], options.device)
    steps = {name: step for name, step in steps.items() if name not in errors}
    times = time_in_turn(steps, options.repeats, options.device, deadline - time.perf_counter())
    rows, first = [], next(iter(makers))
    for name in makers:
        if name in errors:
            rows.append((name, errors[name], *["-"] * (len(COLUMNS) - 1)))
            continue
        speed = "-" if first in errors else spread(paired_ratios(times[first], times[name]), ".3f")
        memory = f"{peaks[name] / peaks[first]:.2f}" if peaks.get(first) else "-"
        rate = f"{flops[name] / statistics.median(times[name]) / 1e9:,.0f}" if flops[name] else "-"
        spent = spread([1e3 * each for each in times[name]], ",.1f")
        rows.append(
            (name, spent, speed, f"{peaks[name] / 1e6:,.1f}", memory, rate, len(times[name]))
        )
    return rows


def first_line(error: Exception) -> str:
    """What went wrong, short enough for a table."""
    text = str(error).strip().partition("\n")[0].replace("|", "/")
    return f"{type(error).__name__}: {text}"[:60]


def paired_ratios(first: list[float], second: list[float]) -> list[float]:
    """The ratios of the seconds of two variants that took turns, pair by pair."""
    return [a / b for a, b in zip(first, second, strict=True)]


def spread(values: list[float], form: str) -> str:
    """'median (least..most)' of measurements."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def markdown_table(*rows: Sequence) -> str:
    """A table in Markdown; the first row is its head."""
    return "\n".join(
        f"| {' | '.join(map(str, row))} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])
    )


def print_table(*rows: tuple) -> None:
    """Print a table in Markdown; the first row is its head."""
    print(f"{markdown_table(*rows)}\n", flush=True)
