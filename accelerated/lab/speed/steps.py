"""The table `steps`: a training step of a model, of its baseline and, if installed, of its paper's public package.

Baselines: for block_recurrent, Slide with one more layer (equal cost in the paper); for compressive, a Transformer-XL that
attends to as many rows; for memformer with memory replay, full back-propagation; for memorizing, a Transformer-XL; for
pretrained_recurrence, plain GPT-2.
"""

import importlib.util
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from accelerated.lab.speed import timing
from accelerated.lab.speed.counts import counted_step, random_model, written_out
from accelerated.lab.speed.horizons import rollout_variant
from accelerated.lab.speed.timing import SEGMENTS, Variant, sizes_line
from accelerated.training.run import compile_model
from accelerated.training.settings import TrainingConfig


def step_variant(name: str, config: Any, options: Namespace, compiler: str = "none", count: int = 0) -> Variant:
    """A training step of `count` segments, else SEGMENTS[model], from a state that has read as many; compiler is --compile's."""
    count, device = count or SEGMENTS[options.model], options.device
    model = random_model(options.model, config, device)
    segments = timing.random_segments(config.vocabulary, config.segment, options.batch, count, device)
    with torch.no_grad(), timing.computing(model, options):
        state = model.initial_state(options.batch)
        for tokens, _ in segments:
            state = model.advance(tokens, state)
    compile_model(model, TrainingConfig(compile=compiler))
    step = timing.training_step(model, timing.reader_of(model), segments, state, options)
    return Variant(name, step)


def counted_variant(name: str, config: Any, options: Namespace) -> Variant:
    """The same with the FLOPs of its products, counted on the plain path."""
    flops = SEGMENTS[options.model] * counted_step(options.model, config, 1, options.batch, written_out).flops
    return step_variant(name, config, options)._replace(flops=flops)


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
    if model == "memorizing":
        names = f"memorizing {config.layers}L, {config.retrieved} of {config.memory}", f"transformer-xl {config.layers}L"
        return dict(zip(names, (config, replace(config, memory=0)), strict=True))
    return {f"GPT-2 {config.layers}L with recurrence": config, f"plain GPT-2 {config.layers}L": replace(config, vectors=0)}


# The public PyTorch packages of the same papers. Each is optional; they compute in bfloat16 by autocast.


def step_of_peer(model: torch.nn.Module, read: Callable, state: object, options: Namespace) -> Callable:
    """A training step of a package's model; read: (tokens, state) -> (logits, state, losses)."""
    config, count = options.config, SEGMENTS[options.model]
    segments = timing.random_segments(config.vocabulary, config.segment, options.batch, count, options.device)
    return timing.training_step(model, timing.reader_of_peer(read), segments, state, options, timing.autocast)


def block_recurrent_peer(options: Namespace) -> Variant:
    """block-recurrent-transformer-pytorch at the same width, depth, heads, window, states and segment."""
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    config = options.config
    model = BlockRecurrentTransformer(
        num_tokens=config.vocabulary, dim=config.width, depth=config.layers, dim_head=config.head_width, heads=config.heads,
        ff_mult=config.feed_forward // config.width, max_seq_len=config.segment, block_width=config.window,
        num_state_vectors=config.states, recurrent_layers=config.recurrent_layers,
    ).to(options.device)  # fmt: skip

    def read(tokens, state):
        return model(tokens)[0], state, {}

    return Variant("block-recurrent-transformer-pytorch (peer)", step_of_peer(model, read, None, options))


def compressive_peer(options: Namespace) -> Variant:
    """compressive-transformer-pytorch at the same sizes, without its GRU gates and enhanced recurrence, from full memories.

    An in-place detach in the package freezes its key and value projections after the first step. They are unfrozen before
    each segment, so that both sides compute the same gradients.
    """
    from compressive_transformer_pytorch import CompressiveTransformer

    config = options.config
    model = CompressiveTransformer(
        num_tokens=config.vocabulary, dim=config.width, depth=config.layers, seq_len=config.segment, mem_len=config.memory,
        cmem_len=config.compressed_memory, cmem_ratio=config.compression_rate, heads=config.heads, gru_gated_residual=False,
        enhanced_recurrence=False,
    ).to(options.device)  # fmt: skip
    sizes = (config.memory, config.compressed_memory)
    full = tuple(torch.randn(config.layers, options.batch, rows, config.width, device=options.device) for rows in sizes)

    def read(tokens, memories):
        model.requires_grad_()
        logits, memories, auxiliary = model(tokens, memories)
        return logits, memories, {"compression": auxiliary.sum()}

    return Variant("compressive-transformer-pytorch (peer)", step_of_peer(model, read, full, options))


def memformer_peer(options: Namespace) -> Variant:
    """memformer's memory_replay_backprop at the same sizes: a loss on the last segment only."""
    import memformer

    config, batch, device = options.config, options.batch, options.device
    model = memformer.Memformer(
        dim=config.width, num_memory_slots=config.slots, mem_update_attn_heads=config.heads,
        enc_depth=config.encoder_layers, enc_num_tokens=config.vocabulary, enc_heads=config.heads, enc_max_seq_len=config.segment,
        dec_depth=config.decoder_layers, dec_num_tokens=config.vocabulary, dec_heads=config.heads, dec_max_seq_len=config.segment,
    ).to(device)  # fmt: skip
    source = torch.randint(config.vocabulary, (batch, SEGMENTS["memformer"] * config.segment), device=device)
    target = torch.randint(config.vocabulary, (batch, config.segment + 1), device=device)

    def step():
        model.zero_grad(set_to_none=False)
        with timing.autocast(model, options):
            memformer.memory_replay_backprop(model, source, target)

    return Variant("memformer (peer), loss on the last", step, timing.counted_flops(step))


def pretrained_recurrence_peer(options: Namespace) -> Variant:
    """transformers' GPT-2 at the same sizes, reading the same windows independently."""
    import transformers

    config = options.config
    sizes = transformers.GPT2Config(
        vocab_size=config.vocabulary, n_positions=config.max_positions, n_embd=config.width, n_layer=config.layers,
        n_head=config.heads, n_inner=config.feed_forward, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(sizes).to(options.device)

    def read(tokens, state):
        return model(tokens, use_cache=False).logits, state, {}

    return Variant("transformers GPT2LMHeadModel (peer)", step_of_peer(model, read, None, options))


PEERS = {
    "block_recurrent": ("block_recurrent_transformer_pytorch", block_recurrent_peer),
    "compressive": ("compressive_transformer_pytorch", compressive_peer),
    "memformer": ("memformer", memformer_peer),
    "pretrained_recurrence": ("transformers", pretrained_recurrence_peer),
}


def rollout_step(name: str, method: str, options: Namespace) -> Variant:
    """A step of Memformer: a rollout with a back-propagation method."""
    model = random_model("memformer", options.config, options.device)
    variant = rollout_variant(name, model, method, SEGMENTS["memformer"], options)
    return variant._replace(flops=timing.counted_flops(variant.step))


def makers_of(options: Namespace) -> dict[str, Callable[[], Variant]]:
    """{name: what makes the Variant} of the model, its baseline and, if installed, its paper's package."""
    config = options.config
    if options.model == "memformer":
        title = f"memformer {config.encoder_layers}+{config.decoder_layers}L"
        methods = {f"{title} {method}": method for method in ("memory_replay", "through_time")}
        makers = {name: partial(rollout_step, name, method, options) for name, method in methods.items()}
    else:
        configs = with_baseline(options.model, config)
        makers = {name: partial(counted_variant, name, own, options) for name, own in configs.items()}
    package, peer = PEERS.get(options.model, ("", None))
    return makers | ({f"{package} (peer)": partial(peer, options)} if package and importlib.util.find_spec(package) else {})


def report(options: Namespace) -> None:
    """Print a row for each variant, and the paired ratios of the first to the others; all steps read equally many tokens."""
    variants, dtype = [make() for make in makers_of(options).values()], getattr(torch, options.dtype)
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
