"""Time training steps: python -m accelerated.bench.

Prints, for a Block-Recurrent Transformer and its Slide baseline of one layer more, and for the package
block-recurrent-transformer-pytorch where it is installed: tokens per second, peak memory, and the fraction of this machine's
measured matrix-multiplication rate. Variants are timed in turn (A B A B ...) in one process, and the ratio is the median of
the paired ratios, so that a noisy machine disturbs both sides alike.
"""

import importlib.util
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from accelerated.allocator import keep_freed_memory
from accelerated.block_recurrent import BlockRecurrent
from accelerated.errors import InputError, run_program
from accelerated.settings import DEVICES, OptionParser, autocast, check_choice, choose_device

PEER = "block_recurrent_transformer_pytorch"
SIZES = {
    "cpu": BlockRecurrent.Config(
        width=256, layers=6, heads=4, head_width=64, feed_forward=1024, window=128, segment=1024, states=128,
        recurrent_layers=(4,), dropout=0.0,
    ),
    "cuda": BlockRecurrent.Config(
        width=1024, layers=12, heads=8, head_width=128, feed_forward=4096, window=512, segment=4096, states=512,
        recurrent_layers=(10,), dropout=0.0,
    ),
}  # fmt: skip


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


def training_flops(config, batch):
    """FLOPs of the matrix products in a forward and a backward, counted on the plain path with the W x 2W tiles of Figure 2."""
    with torch.device("meta"):
        model = BlockRecurrent(config).to("meta")
        tokens = torch.zeros(batch, config.segment, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, model.initial_state(batch)).logits.sum().backward()
    return counter.get_total_flops()


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


def our_variant(name, config, batch, device, dtype):
    model = BlockRecurrent(config).to(device)
    tokens = torch.randint(config.vocabulary, (batch, config.segment + 1), device=device)

    def step():
        model.zero_grad()
        with autocast(dtype, device):
            logits = model(tokens[:, :-1], model.initial_state(batch)).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()

    return Variant(name, step, batch * config.segment, training_flops(config, batch))


def peer_variant(config, batch, device, dtype):
    """The package's model at the same width, depth, heads, window, states and segment."""
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    model = BlockRecurrentTransformer(
        num_tokens=config.vocabulary, dim=config.width, depth=config.layers, dim_head=config.head_width, heads=config.heads,
        ff_mult=config.feed_forward // config.width, max_seq_len=config.segment, block_width=config.window,
        num_state_vectors=config.states, recurrent_layers=config.recurrent_layers,
    ).to(device)  # fmt: skip
    tokens = torch.randint(config.vocabulary, (batch, config.segment + 1), device=device)

    def step():
        model.zero_grad()
        with autocast(dtype, device):
            logits = model(tokens[:, :-1])[0]
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()

    return Variant(f"{PEER} (peer)", step, batch * config.segment, None)


def time_in_turn(variants, repeats, device):
    """{name: [seconds of each repeat]}, the variants taking turns."""
    for variant in variants:
        variant.step()
        variant.step()
    times = {variant.name: [] for variant in variants}
    for _ in range(repeats):
        for variant in variants:
            times[variant.name].append(seconds(variant.step, device))
    return times


def report(variants, times, rate, device):
    """Print a row per variant and the paired ratios against the first."""
    print(f"{'variant':<44}{'ms/step':>9}{'spread':>14}{'tokens/s':>10}{'peak MB':>9}{'GFLOP/s':>9}{'of matmul':>10}")
    for v in variants:
        spent = sorted(times[v.name])
        median = statistics.median(spent)
        flops = f"{v.flops / median / 1e9:>9.0f}{v.flops / median / rate:>10.1%}" if v.flops else f"{'-':>9}{'-':>10}"
        spread = f"{spent[0] * 1e3:.0f}..{spent[-1] * 1e3:.0f}"
        memory = peak_memory(v.step, device) / 1e6
        print(f"{v.name:<44}{median * 1e3:>9.0f}{spread:>14}{v.tokens / median:>10,.0f}{memory:>9.0f}{flops}")
    first = times[variants[0].name]
    for v in variants[1:]:
        ratios = sorted(a / b for a, b in zip(first, times[v.name], strict=True))
        print(f"time of {variants[0].name} / {v.name}: {statistics.median(ratios):.3f} (pairs {ratios[0]:.3f}..{ratios[-1]:.3f})")


def main(argv):
    parser = OptionParser(prog="python -m accelerated.bench", allow_abbrev=False, description=__doc__.partition("\n\n")[2])
    parser.add_argument("--device", default="auto", help="auto takes a GPU where there is one")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 (autocast)")
    parser.add_argument("--batch", type=int, default=4, help="lanes (default 4)")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each variant (default 9)")
    options = parser.parse(argv)
    try:
        check_choice("--device", options.device, DEVICES)
        check_choice("--dtype", options.dtype, ("float32", "bfloat16"))
    except ValueError as error:
        raise InputError(str(error)) from None
    if min(options.batch, options.repeats) < 1:
        raise InputError(f"--batch {options.batch} and --repeats {options.repeats} must be at least 1")
    keep_freed_memory()
    device = choose_device(options.device)
    config = SIZES[device.type]
    slide = replace(config, layers=config.layers + 1, recurrent_layers=())
    run = (options.batch, device, options.dtype)
    variants = [our_variant(f"block-recurrent {config.layers}L {config.gate}:{config.configuration}", config, *run)]
    variants.append(our_variant(f"slide {slide.layers}L", slide, *run))
    if importlib.util.find_spec(PEER):
        variants.append(peer_variant(config, *run))
    dtype = getattr(torch, options.dtype)
    rate = matmul_rate(device, dtype)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{hardware}, torch {torch.__version__}, {options.dtype}; matrix products at {rate / 1e9:.0f} GFLOP/s")
    sizes = {"D": config.width, "H": config.heads, "E": config.head_width, "F": config.feed_forward, "W": config.window}
    sizes |= {"S": config.states, "N": config.segment, "B": options.batch}
    print(", ".join(f"{letter} {size}" for letter, size in sizes.items()))
    times = time_in_turn(variants, options.repeats, device)
    rate = statistics.mean([rate, matmul_rate(device, dtype)])  # before and after, since the machine's speed drifts
    report(variants, times, rate, device)


if __name__ == "__main__":
    run_program("bench", main)
