"""Time training steps: python -m accelerated.bench --model MODEL.

Prints, for a model, its baseline, and the public PyTorch package of the same paper where that is installed: tokens per second,
peak memory, and the fraction of this machine's measured matrix-multiplication rate. Variants are timed in turn (A B A B ...)
in one process, and the ratio is the median of the paired ratios, so that a noisy machine disturbs both sides alike.
block_recurrent stands against its Slide baseline of one layer more (the paper's equal-cost comparison), compressive against the
Transformer-XL that attends to as many rows; its step is four segments, from full memories.
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
from accelerated.compressive import Compressive
from accelerated.errors import InputError, run_program
from accelerated.settings import DEVICES, OptionParser, autocast, check_choice, choose_device

SIZES = {
    ("block_recurrent", "cpu"): BlockRecurrent.Config(
        width=256, layers=6, heads=4, head_width=64, feed_forward=1024, window=128, segment=1024, states=128,
        recurrent_layers=(4,), dropout=0.0,
    ),
    ("block_recurrent", "cuda"): BlockRecurrent.Config(
        width=1024, layers=12, heads=8, head_width=128, feed_forward=4096, window=512, segment=4096, states=512,
        recurrent_layers=(10,), dropout=0.0,
    ),
    ("compressive", "cpu"): Compressive.Config(
        width=256, layers=6, heads=4, head_width=64, feed_forward=1024, segment=256, memory=256, compressed_memory=64,
        compression_rate=4,
    ),
    ("compressive", "cuda"): Compressive.Config(
        width=1024, layers=18, heads=16, head_width=64, feed_forward=4096, segment=512, memory=512, compressed_memory=512,
        compression_rate=4,
    ),
}  # fmt: skip
SEGMENTS = {"block_recurrent": 1, "compressive": 4}  # in a training step


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


def objective_of(model, segments, state):
    """Mean cross-entropy over segments [(tokens, targets)] plus auxiliary losses, the state carried."""
    total = 0.0
    for tokens, targets in segments:
        logits, state, auxiliary = model(tokens, state)
        total = total + functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + sum(auxiliary.values())
    return total


def training_flops(model_class, config, batch, count):
    """FLOPs of the matrix products in a forward and a backward of `count` segments, counted on the plain path."""
    with torch.device("meta"):
        model = model_class(config).to("meta")
        tokens = torch.zeros(batch, config.segment, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        objective_of(model, [(tokens, tokens)] * count, model.initial_state(batch)).backward()
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


def random_segments(vocabulary, length, batch, count, device):
    text = torch.randint(vocabulary, (batch, count * length + 1), device=device)
    return list(zip(text[:, :-1].split(length, 1), text[:, 1:].split(length, 1), strict=True))


def our_variant(name, model_class, config, count, batch, device, dtype):
    """Training steps of `count` segments, from a state that has already read as many."""
    model = model_class(config).to(device)
    segments = random_segments(config.vocabulary, config.segment, batch, count, device)
    state = model.initial_state(batch)
    with torch.no_grad():
        for tokens, _ in segments:
            state = model.advance(tokens, state)

    def step():
        model.zero_grad()
        with autocast(dtype, device):
            objective = objective_of(model, segments, state)
        objective.backward()

    tokens = batch * config.segment * count
    return Variant(name, step, tokens, training_flops(model_class, config, batch, count))


def block_recurrent_peer(config, batch, device, dtype):
    """block-recurrent-transformer-pytorch at the same width, depth, heads, window, states and segment."""
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    model = BlockRecurrentTransformer(
        num_tokens=config.vocabulary, dim=config.width, depth=config.layers, dim_head=config.head_width, heads=config.heads,
        ff_mult=config.feed_forward // config.width, max_seq_len=config.segment, block_width=config.window,
        num_state_vectors=config.states, recurrent_layers=config.recurrent_layers,
    ).to(device)  # fmt: skip
    [(tokens, targets)] = random_segments(config.vocabulary, config.segment, batch, 1, device)

    def step():
        model.zero_grad()
        with autocast(dtype, device):
            loss = functional.cross_entropy(model(tokens)[0].flatten(0, 1).float(), targets.flatten())
        loss.backward()

    return Variant("block-recurrent-transformer-pytorch (peer)", step, batch * config.segment, None)


def compressive_peer(config, batch, device, dtype):
    """compressive-transformer-pytorch at the same sizes, without its GRU gates and enhanced recurrence, from full memories.

    The package freezes its key and value projections for good in the first step (an in-place detach); they are set to be
    trained again before each segment, so that both sides compute the same gradients.
    """
    from compressive_transformer_pytorch import CompressiveTransformer

    model = CompressiveTransformer(
        num_tokens=config.vocabulary, dim=config.width, depth=config.layers, seq_len=config.segment, mem_len=config.memory,
        cmem_len=config.compressed_memory, cmem_ratio=config.compression_rate, heads=config.heads, gru_gated_residual=False,
        enhanced_recurrence=False,
    ).to(device)  # fmt: skip
    count = SEGMENTS["compressive"]
    segments = random_segments(config.vocabulary, config.segment, batch, count, device)
    sizes = (config.memory, config.compressed_memory)
    full = tuple(torch.randn(config.layers, batch, rows, config.width, device=device) for rows in sizes)

    def step():
        model.zero_grad()
        total, memories = 0.0, full
        with autocast(dtype, device):
            for tokens, targets in segments:
                model.requires_grad_()
                logits, memories, auxiliary = model(tokens, memories)
                total = total + functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + auxiliary.sum()
        total.backward()

    return Variant("compressive-transformer-pytorch (peer)", step, batch * config.segment * count, None)


PEERS = {
    "block_recurrent": ("block_recurrent_transformer_pytorch", block_recurrent_peer),
    "compressive": ("compressive_transformer_pytorch", compressive_peer),
}


def variants_of(name, config, batch, device, dtype):
    """The model, its baseline, and its peer where that is installed."""
    run = (SEGMENTS[name], batch, device, dtype)
    if name == "block_recurrent":
        slide = replace(config, layers=config.layers + 1, recurrent_layers=())
        variants = [
            our_variant(f"block-recurrent {config.layers}L {config.gate}:{config.configuration}", BlockRecurrent, config, *run)
        ]
        variants.append(our_variant(f"slide {slide.layers}L", BlockRecurrent, slide, *run))
    else:
        longer = replace(config, memory=config.memory + config.compressed_memory, compressed_memory=0)
        variants = [our_variant(f"compressive {config.layers}L {config.compression}", Compressive, config, *run)]
        variants.append(our_variant(f"transformer-xl {longer.layers}L, memory {longer.memory}", Compressive, longer, *run))
    package, peer = PEERS[name]
    if importlib.util.find_spec(package):
        variants.append(peer(config, batch, device, dtype))
    return variants


def sizes_line(config, batch):
    letters = {"D": "width", "L": "layers", "H": "heads", "E": "head_width", "F": "feed_forward", "N": "segment"}
    letters |= {"W": "window", "S": "states", "M": "memory", "C": "compressed_memory", "c": "compression_rate"}
    sizes = [f"{letter} {getattr(config, field)}" for letter, field in letters.items() if hasattr(config, field)]
    return ", ".join([*sizes, f"B {batch}"])


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
    parser.add_argument("--model", default="block_recurrent", help=f"one of {', '.join(PEERS)} (default block_recurrent)")
    parser.add_argument("--device", default="auto", help="auto takes a GPU where there is one")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 (autocast)")
    parser.add_argument("--batch", type=int, default=4, help="lanes (default 4)")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each variant (default 9)")
    options = parser.parse(argv)
    try:
        check_choice("--model", options.model, tuple(PEERS))
        check_choice("--device", options.device, DEVICES)
        check_choice("--dtype", options.dtype, ("float32", "bfloat16"))
    except ValueError as error:
        raise InputError(str(error)) from None
    if min(options.batch, options.repeats) < 1:
        raise InputError(f"--batch {options.batch} and --repeats {options.repeats} must be at least 1")
    keep_freed_memory()
    device = choose_device(options.device)
    config = SIZES[options.model, device.type]
    variants = variants_of(options.model, config, options.batch, device, options.dtype)
    dtype = getattr(torch, options.dtype)
    rate = matmul_rate(device, dtype)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{hardware}, torch {torch.__version__}, {options.dtype}; matrix products at {rate / 1e9:.0f} GFLOP/s")
    print(sizes_line(config, options.batch))
    times = time_in_turn(variants, options.repeats, device)
    rate = statistics.mean([rate, matmul_rate(device, dtype)])  # before and after, since the machine's speed drifts
    report(variants, times, rate, device)


if __name__ == "__main__":
    run_program("bench", main)
