"""The command `gpu`: writes a Markdown page on one GPU: agreement with a CPU's float64, then speed at the papers' sizes.

A section measures until its share of ten minutes is used up. What does not fit into memory or does not compile is a row.
"""

import datetime
import gc
import math
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from accelerated.attention import sliding_window
from accelerated.evaluation.generation import Sampling, generate, read_prompt, step_of
from accelerated.lab.markdown import markdown_table
from accelerated.lab.speed import horizons, steps, timing
from accelerated.lab.speed.agreement import SMALL, attentions, compiled_flex, errors_of_attention, errors_of_model
from accelerated.lab.speed.counts import random_model
from accelerated.lab.speed.timing import SEGMENTS, SIZES, Variant, paper_settings, sizes_line
from accelerated.models import NAMES
from accelerated.program.errors import InputError
from accelerated.protocol import computing_in
from accelerated.training.process import choose_device
from accelerated.training.settings import COMPILERS

REPEATS = 20  # at most; a section's time may end them earlier
DENSE_PEAK = {"H100": 989e12, "H200": 989e12}  # FLOP/s of a card in bfloat16, by its makers
LANES = {"block_recurrent": 8, "compressive": 8, "memformer": 32, "memorizing": 8, "pretrained_recurrence": 32}
TABLE_1 = {  # step time relative to Slide:13L (Block-Recurrent Transformer, Table 1)
    "XL:512": 0.88, "XL:1024": 1.20, "XL:2048": 2.11, "Slide:12L": 0.93, "Slide:13L": 1.00, "Rec:lstm:dual": 1.06,
    "Rec:lstm:single": 1.05, "Rec:lstm:skip": 1.00, "Rec:fixed:dual": 1.01, "Rec:fixed:single": 1.02, "Rec:fixed:skip": 0.99,
    "Feedback:lstm:single": 1.40, "Feedback:fixed:skip": 1.35,
}  # fmt: skip
TABLE_3 = {"through_time": (1.00, 16_177), "checkpointed": (0.48, 9_885), "memory_replay": (0.90, 7_229)}  # speed, MB


class Setting(NamedTuple):
    """What the sections measure, and where."""

    device: torch.device
    configs: dict  # {model: Config} to time
    small: dict  # {model: Config} to compare with the CPU
    lanes: dict  # {model: lanes}
    positions: tuple[int, ...]  # of generated tokens
    tokens: int  # generated and timed together
    seconds: float  # of the whole page

    def options(self, model: str, lanes: int | None = None) -> Namespace:
        """What `steps` and `horizons` read of the command line."""
        return Namespace(
            model=model, config=self.configs[model], device=self.device, dtype="bfloat16", batch=lanes or self.lanes[model]
        )


def first_line(error: Exception) -> str:
    """What went wrong, short enough for a table."""
    text = str(error).strip().partition("\n")[0].replace("|", "/")
    return f"{type(error).__name__}: {text}"[:60]


def agreement(setting: Setting) -> tuple[list[str], int]:
    """The section on agreement and the number of rows that fail."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        checks = {f"{name} attention": (errors_of_attention, (name,)) for name in attentions(setting.device)}
        checks |= {name: (errors_of_model, (name, config)) for name, config in setting.small.items()}
        for name, (errors, given) in checks.items():
            try:
                for what, error, allowed in errors(*given, setting.device, dtype):
                    passes = error <= allowed  # false for NaN
                    rows.append((name, str(dtype)[6:], what, f"{error:.1e}", f"{allowed:.0e}", "ok" if passes else "FAIL"))
            except Exception as error:
                rows.append((name, str(dtype)[6:], first_line(error), "-", "-", "FAIL"))
    failed = sum(row[-1] == "FAIL" for row in rows)
    lines = [
        "Errors are the largest difference from the CPU's float64, divided by the largest magnitude.", "",
        markdown_table(("what", "type", "of it", "measured", "allowed", ""), *rows),
    ]  # fmt: skip
    return lines, failed


def dense_peak(device: torch.device) -> tuple[float, str]:
    """FLOP/s in bfloat16 to compare with, and what they are."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for name, peak in DENSE_PEAK.items():
        if name in card:
            return peak, f"the dense bfloat16 peak of {name}, {peak / 1e12:.0f} TFLOP/s"
    rate = timing.matmul_rate(device, torch.bfloat16)
    return rate, f"the measured rate of one large product, {rate / 1e12:.3g} TFLOP/s (this card's peak is not known here)"


class Measured(NamedTuple):
    """The times of a variant's steps, its peak memory, or why it has none."""

    seconds: list[float]
    peak: int
    flops: float | None
    error: str = ""


def measured(makers: dict[str, Callable[[], Variant]], setting: Setting, share: float) -> dict[str, Measured]:
    """{name: Measured}; variants take turns until `share` of the page's time is used up. A failure is no crash."""
    deadline, device, variants, failed = time.perf_counter() + share * setting.seconds, setting.device, [], {}

    def attempt(name: str, step: Callable[[], Any]) -> Any:
        """What a call of a variant returns; None if the variant has failed, or fails now."""
        try:
            return None if name in failed else step()
        except Exception as error:
            failed[name] = Measured([], 0, None, first_line(error))
            free(device)

    for name, make in makers.items():
        if time.perf_counter() >= deadline:
            failed[name] = Measured([], 0, None, "no time was left")
        elif variant := attempt(name, make):
            variants.append(variant._replace(name=name, step=partial(attempt, name, variant.step)))
            variants[-1].step()
    variants = [variant for variant in variants if variant.name not in failed]
    peaks = {variant.name: timing.peak_memory(variant.step, device) for variant in variants}
    times = timing.time_in_turn(variants, REPEATS, device, deadline - time.perf_counter())
    found = {v.name: Measured(times[v.name], peaks[v.name], v.flops) for v in variants} | failed
    return {name: found[name] for name in makers}


def free(device: torch.device) -> None:
    """Give back what a failed variant held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def milliseconds(found: Measured) -> str:
    """Median and spread of a variant's times, or its error."""
    return found.error or timing.spread([1e3 * second for second in found.seconds], ".1f")


def ratio(found: Measured, to: Measured) -> str:
    """The median of the ratios of two variants' times, pair by pair."""
    pairs = timing.paired_ratios(found.seconds, to.seconds) if found.seconds and to.seconds else []
    return f"{statistics.median(pairs):.2f}" if pairs else "-"


def training(setting: Setting) -> Iterator[str]:
    """The section on a training step of each model, its baseline and its paper's package."""
    peak, what = dense_peak(setting.device)
    yield from (f"Share is of {what}.", "Time is over that of the model's first row, pair by pair.")
    for model in NAMES:
        options = setting.options(model)
        found = measured(steps.makers_of(options), setting, 0.06)
        own, tokens = next(iter(found.values())), options.batch * options.config.segment * SEGMENTS[model]
        rows = []
        for name, each in found.items():
            median = statistics.median(each.seconds) if each.seconds else math.inf
            share = f"{each.flops / median / peak:.1%}" if each.flops else "-"
            numbers = (f"{tokens / median:,.0f}", f"{each.peak / 1e9:.1f}", share, ratio(each, own), len(each.seconds))
            rows.append((name, milliseconds(each), *numbers))
        head = ("variant", "ms a step", "tokens/s", "peak GB", "share", "time", "repeats")
        yield from ("", f"{model}: {sizes_line(options.config, options.batch)}", "", markdown_table(head, *rows))


def compiled(setting: Setting) -> Iterator[str]:
    """The section on --compile, beside the same step without it.

    A CUDA graph is recorded for one segment, and used again after its backward pass: so a step has one segment here.
    """
    yield from ("A step of one segment.", "")
    rows = []
    for model in NAMES:
        options = setting.options(model)
        makers = {name: partial(steps.step_variant, name, options.config, options, name, 1) for name in COMPILERS}
        found = measured(makers, setting, 0.06)
        for name, each in found.items():
            rows.append(
                (model, name, milliseconds(each), f"{each.peak / 1e9:.1f}", ratio(each, found["none"]), len(each.seconds))
            )
    yield markdown_table(("model", "--compile", "ms a step", "peak GB", "time of none's", "repeats"), *rows)


def config_of_table_1(name: str, config: Any) -> Any:
    """The Config of a row of the Block-Recurrent paper's Table 1, from its Rec:fixed:skip."""
    kind, *rest = name.split(":")
    if kind == "XL":
        window = int(rest[0]) * config.window // 512  # a small window in tests
        return replace(config, window=window, segment=window, recurrent_layers=())
    if kind == "Slide":
        return replace(config, layers=config.layers + int(rest[0][:2]) - 12, recurrent_layers=())
    return replace(config, gate=rest[0], configuration=rest[1], feedback=kind == "Feedback")


def table_1(setting: Setting) -> Iterator[str]:
    """The section on the Block-Recurrent paper's Table 1: step times relative to Slide:13L, as many tokens in each step."""
    base, makers = setting.options("block_recurrent"), {}
    for name in ("Slide:13L", *(name for name in TABLE_1 if name != "Slide:13L")):
        config = config_of_table_1(name, base.config)
        options = setting.options("block_recurrent", base.batch * base.config.segment // config.segment)
        makers[name] = partial(steps.step_variant, name, config, options)
    found = measured(makers, setting, 0.15)
    rows = [
        (name, milliseconds(found[name]), ratio(found[name], found["Slide:13L"]), f"{paper:.2f}", len(found[name].seconds))
        for name, paper in TABLE_1.items()
    ]
    yield markdown_table(("model", "ms a step", "relative", "the paper's", "repeats"), *rows)


def table_3(setting: Setting) -> Iterator[str]:
    """The section on Memformer's Table 3: three ways of back-propagation at horizon 4."""
    for title, config in horizons.configs_to_compare("memformer", setting.configs["memformer"]).items():
        options = setting.options("memformer")
        model = random_model("memformer", config, setting.device)
        makers = {method: partial(horizons.rollout_variant, method, model, method, 4, options) for method in TABLE_3}
        found, rows = measured(makers, setting, 0.03), []
        whole = found["through_time"]
        for method, (speed, megabytes) in TABLE_3.items():
            each = found[method]
            share = f"{each.peak / whole.peak:.2f}" if each.peak and whole.peak else "-"
            memory = (f"{each.peak / 1e6:,.0f}", share, f"{megabytes / 16_177:.2f}")
            rows.append((method, milliseconds(each), ratio(whole, each), f"{speed:.2f}", *memory, len(each.seconds)))
        head = ("method", "ms", "speed", "the paper's", "peak MB", "of BPTT's", "the paper's", "repeats")
        yield from (f"{title}, {options.batch} lanes, horizon 4", "", markdown_table(head, *rows), "")


@torch.no_grad()
def token_times(model: str, config: Any, setting: Setting) -> list[float]:
    """Milliseconds of a generated token after texts of each length in setting.positions."""
    network, times = random_model(model, config, setting.device).eval(), []
    generator = torch.Generator(setting.device).manual_seed(0)
    text = torch.randint(config.vocabulary, (1, max(setting.positions)), generator=generator, device=setting.device)
    with computing_in(network, torch.bfloat16):
        for position in setting.positions:
            start, step = read_prompt(network, text[:, :position]), step_of(network)
            tokens = partial(generate, network, *start, setting.tokens, Sampling(0.8), generator, step)
            list(tokens())  # captures the CUDA graph
            spent = [timing.seconds(lambda tokens=tokens: list(tokens()), setting.device) for _ in range(3)]
            times.append(1e3 * statistics.median(spent) / setting.tokens)
    return times


def generation(setting: Setting) -> Iterator[str]:
    """The section on generation: time per token after texts of two lengths."""
    rows = []
    for model, config in setting.configs.items():
        try:
            times = token_times(model, config, setting)
            rows.append((model, *(f"{spent:.2f}" for spent in times), f"{times[-1] / times[0]:.2f}"))
        except Exception as error:
            rows.append((model, first_line(error), *("-" for _ in setting.positions)))
            free(setting.device)
    yield markdown_table(("model", *(f"ms a token after {position:,}" for position in setting.positions), "ratio"), *rows)


def window_step(attend: Callable, config: Any, lanes: int, device: torch.device) -> Variant:
    """Forward and backward of a sliding window's attention without dropout, at the model's sizes."""
    b, h, n, w, e = lanes, config.heads, config.segment, config.window, config.head_width
    mask = sliding_window.window_mask(sliding_window.tile_distance(w), w).to(device)
    shapes = ((b, h, n, e), (b, h, w + n, e), (b, h, w + n, e))
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    offset = torch.zeros(h, w, 2 * w, device=device, dtype=torch.bfloat16).masked_fill_(~mask, -math.inf).requires_grad_()
    return Variant("", lambda: attend(*inputs, offset).sum().backward())


def windows(setting: Setting) -> Iterator[str]:
    """The section on the sliding window: SDPA over tiles beside flex_attention and the plain path."""
    config, lanes = setting.configs["block_recurrent"], setting.lanes["block_recurrent"]
    ways = {"SDPA": sliding_window.sliding_attention_sdpa, "plain": sliding_window.sliding_attention_plain}
    if setting.device.type != "cpu":  # there it has no backward pass
        ways["flex_attention"] = compiled_flex
    found = measured(
        {name: partial(window_step, way, config, lanes, setting.device) for name, way in ways.items()}, setting, 0.03
    )
    rows = [(k, milliseconds(x), f"{x.peak / 1e9:.1f}", ratio(x, found["SDPA"]), len(x.seconds)) for k, x in found.items()]
    yield markdown_table(("path", "ms", "peak GB", "time of SDPA's", "repeats"), *rows)


SECTIONS = {
    "A training step": training,
    "The Block-Recurrent paper's Table 1": table_1,
    "Memformer's Table 3": table_3,
    "Generation": generation,
    "The sliding window": windows,
    "torch.compile": compiled,  # last: what a compiler takes is not known before
}


def driver() -> str:
    """The version of the card's driver, as nvidia-smi says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def heading(setting: Setting) -> Iterator[str]:
    """The first lines of the page: on what it was measured, and how."""
    cuda = setting.device.type == "cuda"
    card = torch.cuda.get_device_name(setting.device) if cuda else str(setting.device)
    facts = {"card": card, "driver": driver() if cuda else "none", "torch": torch.__version__,
             "date": datetime.date.today().isoformat(), "command": "`python -m accelerated.lab.speed gpu --out FILE.md`"}  # fmt: skip
    yield from ("# Measured on a GPU", "", markdown_table(("what", "value"), *facts.items()), "")
    yield "Models compute in bfloat16, with the papers' dropout. Times are medians (least..most)."


def write_page(setting: Setting, file: TextIO) -> int:
    """Write the page, each section when it is measured; returns how many rows of agreement fail."""

    def write(*lines):
        file.write("\n".join(lines).rstrip() + "\n")
        file.flush()

    write(*heading(setting))
    compared, failed = agreement(setting)
    write("", "## Agreement with the CPU", "", *compared)
    for title, section in SECTIONS.items():
        try:
            lines = list(section(setting))
        except Exception as error:
            lines = [f"Not measured: {first_line(error)}"]
        write("", f"## {title}", "", *lines)
        free(setting.device)
    return failed


def paper_setting(device: torch.device) -> Setting:
    """What the command measures."""
    configs = {model: paper_settings(model)[0] for model in NAMES}
    small = {model: replace(SIZES[model], **SMALL[model]) for model in NAMES}
    return Setting(device, configs, small, LANES, (1_000, 100_000), 100, 540.0)


def report(options: Namespace) -> None:
    """Write the page to --out; exits with code 1 if a fast path disagrees with the CPU, after writing the page.

    What is measured is kept if it is stopped.
    """
    if not torch.cuda.is_available():
        raise InputError("gpu measures a CUDA GPU, and torch finds none here; the table counts needs none")
    path = Path(options.out)
    try:
        file = path.open("x")  # before the ten minutes of measuring
    except FileExistsError:
        raise InputError(f"--out {path} exists already; give another name") from None
    except OSError as error:
        raise InputError(f"cannot write --out {path}: {error.strerror}") from None
    with file:
        failed = write_page(paper_setting(choose_device("cuda")), file)
    print(f"{path} is written; {failed} rows of agreement fail")
    if failed:
        raise SystemExit(1)
