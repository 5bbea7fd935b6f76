"""Time training steps: python -m accelerated.bench --model MODEL.

Prints, for a model, its baseline, and the public PyTorch package of the same paper where that is installed: tokens per second,
peak memory, and the fraction of this machine's measured matrix-multiplication rate. Variants are timed in turn (A B A B ...)
in one process, and the ratio is the median of the paired ratios, so that a noisy machine disturbs both sides alike.
block_recurrent stands against its Slide baseline of one layer more (the paper's equal-cost comparison), compressive against the
Transformer-XL that attends to as many rows; its step is four segments, from full memories. memformer trains 16 segments by memory
replay with a loss on each, its package with a loss on the last. --table horizons times the three back-propagation methods of
any model and measures their peak memory at horizons from 1 to 32 (Memformer, Table 3), --table positions its two relative
position encodings (Table 2). pretrained_recurrence stands against plain GPT-2, ours and the `transformers` package's; --table
overlaps times the evaluation of the plain one at several overlaps.
"""

import importlib.util
import statistics
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from accelerated.bench.timing import Variant, matmul_rate, paired_ratios, peak_memory, time_in_turn
from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.data.lanes import Segment
from accelerated.data.windows import Document
from accelerated.errors import InputError, run_program
from accelerated.evaluation.score import evaluate
from accelerated.memformer import Memformer
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.protocol import detach
from accelerated.replay import BACKPROP
from accelerated.training.options import OptionParser
from accelerated.training.process import autocast, choose_device, keep_freed_memory
from accelerated.training.settings import DEVICES, check_choice

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
    ("pretrained_recurrence", "cpu"): PretrainedRecurrence.Config(
        width=256, layers=6, heads=4, feed_forward=1024, max_positions=256, segment=128,
    ),
    ("pretrained_recurrence", "cuda"): PretrainedRecurrence.Config(
        vocabulary=50257, width=768, layers=12, heads=12, feed_forward=3072, max_positions=1024, segment=300,
    ),
    ("memformer", "cpu"): Memformer.Config(
        width=256, encoder_layers=3, decoder_layers=3, heads=4, head_width=64, feed_forward=1024, segment=64, slots=32,
    ),
    ("memformer", "cuda"): Memformer.Config(
        width=512, encoder_layers=4, decoder_layers=8, heads=8, head_width=64, feed_forward=2048, segment=64, slots=32,
    ),
}  # fmt: skip
SEGMENTS = {"block_recurrent": 1, "compressive": 4, "memformer": 16, "pretrained_recurrence": 4}  # in a training step
BATCH = {"block_recurrent": 4, "compressive": 4, "memformer": 8, "pretrained_recurrence": 8}
HORIZONS = (1, 2, 4, 8, 16, 32)
WINDOWS = (1, 4, 20)  # horizons of pretrained_recurrence, whose paper has 20
OVERLAPS = (0, 5, 10, 30, 50, 96)
TABLES = ("steps", "horizons", "positions", "overlaps")


def objective_of(model, segments, state):
    """Mean cross-entropy over segments [(tokens, targets)] plus auxiliary losses, the state carried."""
    total = 0.0
    for tokens, targets in segments:
        logits, state, auxiliary = model(tokens, state)
        total = total + functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + sum(auxiliary.values())
    return total


def counted_flops(step):
    """FLOPs of the matrix products that a step takes."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def training_flops(model_class, config, batch, count):
    """FLOPs of the matrix products in a forward and a backward of `count` segments, counted on the plain path."""
    with torch.device("meta"):
        model = model_class(config).to("meta")
        tokens = torch.zeros(batch, config.segment, dtype=torch.long)
    return counted_flops(lambda: objective_of(model, [(tokens, tokens)] * count, model.initial_state(batch)).backward())


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


def rollout_variant(name, model, method, horizon, batch, device, dtype):
    """One rollout by a back-propagation method, from a state in mid-document; gradients stay allocated between steps."""
    config, segments = model.config, []
    for tokens, targets in random_segments(config.vocabulary, config.segment, batch, horizon, device):
        never = torch.zeros(batch, dtype=torch.bool, device=device)
        segments.append(Segment(tokens, targets, torch.ones_like(tokens, dtype=torch.bool), never))
    state = detach(model.advance(segments[0].tokens, model.initial_state(batch)))

    def step():
        model.zero_grad(set_to_none=False)
        with autocast(dtype, device):
            BACKPROP[method](model, segments, state)

    return Variant(name, step, batch * config.segment * horizon, None)


def memformer_peer(config, batch, device, dtype):
    """memformer's memory_replay_backprop at the same sizes: a loss on the last segment only."""
    import memformer

    stacks = {
        f"{stack}_{name}": value
        for stack in ("enc", "dec")
        for name, value in (("num_tokens", config.vocabulary), ("heads", config.heads), ("max_seq_len", config.segment))
    }
    model = memformer.Memformer(
        dim=config.width, num_memory_slots=config.slots, mem_update_attn_heads=config.heads, enc_depth=config.encoder_layers,
        dec_depth=config.decoder_layers, **stacks,
    ).to(device)  # fmt: skip
    count = SEGMENTS["memformer"]
    source = torch.randint(config.vocabulary, (batch, count * config.segment), device=device)
    target = torch.randint(config.vocabulary, (batch, config.segment + 1), device=device)

    def step():
        model.zero_grad(set_to_none=False)
        with autocast(dtype, device):
            memformer.memory_replay_backprop(model, source, target)

    return Variant("memformer (peer), loss on the last", step, batch * config.segment * count, counted_flops(step))


def pretrained_recurrence_peer(config, batch, device, dtype):
    """transformers' GPT-2 at the same sizes, reading the same windows, each by itself."""
    import transformers

    sizes = transformers.GPT2Config(
        vocab_size=config.vocabulary, n_positions=config.max_positions, n_embd=config.width, n_layer=config.layers,
        n_head=config.heads, n_inner=config.feed_forward, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model, count = transformers.GPT2LMHeadModel(sizes).to(device), SEGMENTS["pretrained_recurrence"]
    segments = random_segments(config.vocabulary, config.segment, batch, count, device)

    def step():
        model.zero_grad()
        total = 0.0
        with autocast(dtype, device):
            for tokens, targets in segments:
                logits = model(tokens, use_cache=False).logits
                total = total + functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        total.backward()

    return Variant("transformers GPT2LMHeadModel (peer)", step, batch * config.segment * count, None)


PEERS = {
    "block_recurrent": ("block_recurrent_transformer_pytorch", block_recurrent_peer),
    "compressive": ("compressive_transformer_pytorch", compressive_peer),
    "memformer": ("memformer", memformer_peer),
    "pretrained_recurrence": ("transformers", pretrained_recurrence_peer),
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
    elif name == "memformer":
        model = Memformer(config).to(device)
        title = f"memformer {config.encoder_layers}+{config.decoder_layers}L"
        variants = [rollout_variant(f"{title} {method}", model, method, *run) for method in ("memory_replay", "through_time")]
        variants = [variant._replace(flops=counted_flops(variant.step)) for variant in variants]
    elif name == "pretrained_recurrence":
        plain = replace(config, vectors=0)
        variants = [our_variant(f"GPT-2 {config.layers}L with recurrence", PretrainedRecurrence, config, *run)]
        variants.append(our_variant(f"plain GPT-2 {config.layers}L", PretrainedRecurrence, plain, *run))
    else:
        longer = replace(config, memory=config.memory + config.compressed_memory, compressed_memory=0)
        variants = [our_variant(f"compressive {config.layers}L {config.compression}", Compressive, config, *run)]
        variants.append(our_variant(f"transformer-xl {longer.layers}L, memory {longer.memory}", Compressive, longer, *run))
    package, peer = PEERS[name]
    if importlib.util.find_spec(package):
        variants.append(peer(config, batch, device, dtype))
    return variants


def sizes_line(config, batch):
    letters = {"D": "width", "L": "layers", "L encoder": "encoder_layers", "L decoder": "decoder_layers", "H": "heads"}
    letters |= {"E": "head_width", "F": "feed_forward", "N": "segment", "W": "window", "S": "states", "S slots": "slots"}
    letters |= {"M": "memory", "C": "compressed_memory", "c": "compression_rate"}
    sizes = [f"{letter} {getattr(config, field)}" for letter, field in letters.items() if hasattr(config, field)]
    return ", ".join([*sizes, f"B {batch}"])


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
        ratios = paired_ratios(first, times[v.name])
        print(f"time of {variants[0].name} / {v.name}: {statistics.median(ratios):.3f} (pairs {ratios[0]:.3f}..{ratios[-1]:.3f})")


def horizon_models(name, config):
    """{title: (class, config)} to compare the methods on; of Memformer the paper's two models, at this width."""
    if name == "block_recurrent":
        return {name: (BlockRecurrent, replace(config, segment=2 * config.window))}  # 32 segments must fit into memory
    if name == "compressive":
        return {name: (Compressive, config)}
    if name == "pretrained_recurrence":
        return {name: (PretrainedRecurrence, config)}
    return {
        "encoder-decoder, 4+8 layers": (Memformer, replace(config, encoder_layers=4, decoder_layers=8)),
        "decoder-only, 12 layers": (Memformer, replace(config, encoder_layers=0, decoder_layers=12)),
    }


def report_horizons(name, config, options, device):
    """Print time and peak memory of the three methods at every horizon; speed is relative to full BPTT, in pairs."""
    print("Memformer's Table 3, horizon 4 on a GPU: BPTT 16,177 MB, x1.00; checkpointing 9,885 MB, x0.48; MRBP 7,229 MB, x0.90")
    for title, (model_class, sizes) in horizon_models(name, config).items():
        model = model_class(sizes).to(device)
        state = sum(field.numel() * field.element_size() for field in model.initial_state(options.batch)) / 1e6
        print(f"{title}: {sizes_line(sizes, options.batch)}; a stored state is {state:.2f} MB")
        print(f"{'horizon':>7} {'method':<14}{'ms':>8}{'spread':>15}{'speed':>7}{'pairs':>13}{'peak MB':>9}{'of BPTT':>9}")
        for horizon in WINDOWS if name == "pretrained_recurrence" else HORIZONS:
            variants = [rollout_variant(m, model, m, horizon, options.batch, device, options.dtype) for m in BACKPROP]
            times = time_in_turn(variants, options.repeats, device)
            full = peak_memory(variants[0].step, device)
            for variant in variants:
                spent, ratios = sorted(times[variant.name]), paired_ratios(times["through_time"], times[variant.name])
                peak = peak_memory(variant.step, device)
                spread = f"{spent[0] * 1e3:.0f}..{spent[-1] * 1e3:.0f}"
                print(f"{horizon:7d} {variant.name:<14}{statistics.median(spent) * 1e3:8.0f}{spread:>15}"
                      f"{statistics.median(ratios):7.2f}{f'{ratios[0]:.2f}..{ratios[-1]:.2f}':>13}"
                      f"{peak / 1e6:9.1f}{peak / full:9.2f}", flush=True)  # fmt: skip


def positions_variant(positions, batch, device, dtype):
    """Forward and backward of one causal self-attention with its projections, at Table 2's sizes, and its parameters."""
    sizes = {"width": 512, "encoder_layers": 0, "decoder_layers": 1, "heads": 8, "head_width": 64, "positions": positions}
    model = Memformer(Memformer.Config(**sizes)).to(device)
    p, x = model.decoder.layers[0].attention, torch.randn(batch, model.config.segment, 512, device=device)

    def step():
        with autocast(dtype, device):
            model.self_attention(p, model.decoder, x).sum().backward()

    parameters = sum(value.numel() for name, value in p.named_parameters() if "norm" not in name)
    with torch.no_grad():
        flops = counted_flops(lambda: model.self_attention(p, model.decoder, x))
    return Variant(positions, step, batch * model.config.segment, flops), parameters


def report_positions(options, device):
    """Print time, FLOPs and parameters of the two relative position encodings, both on their plain paths."""
    print("Memformer's Table 2: XL RPE 1.27 ms, 68.99 GFLOPs, 1.32M parameters; simplified 0.88 ms, 68.72 GFLOPs, 1.05M")
    rows = [positions_variant(positions, options.batch, device, options.dtype) for positions in ("transformer_xl", "simplified")]
    times = time_in_turn([variant for variant, _ in rows], options.repeats, device)
    print(f"{'positions':<16}{'ms':>8}{'spread':>15}{'forward GFLOPs':>16}{'parameters':>12}")
    for variant, parameters in rows:
        spent = sorted(times[variant.name])
        spread = f"{spent[0] * 1e3:.2f}..{spent[-1] * 1e3:.2f}"
        print(f"{variant.name:<16}{statistics.median(spent) * 1e3:8.2f}{spread:>15}{variant.flops / 1e9:16.3f}{parameters:12,d}")
    ratios = paired_ratios(times["simplified"], times["transformer_xl"])
    print(f"time of simplified / transformer_xl: {statistics.median(ratios):.3f} (pairs {ratios[0]:.3f}..{ratios[-1]:.3f})")


class Tokens:
    """A tokenizer of so many tokens, a byte each."""

    def __init__(self, vocabulary):
        self.token_bytes = np.ones(vocabulary, int)


def random_document(length, vocabulary):
    text = np.random.default_rng(length).integers(vocabulary, size=length + 1)
    return Document(str(length), text[:-1], text[1:], np.ones(length, bool))


def overlap_variant(config, documents, options, device):
    """Evaluating documents with plain GPT-2 at config's overlap."""
    model, tokenizer = PretrainedRecurrence(config).to(device), Tokens(config.vocabulary)

    def step():
        with autocast(options.dtype, device):
            evaluate(model, documents, tokenizer, options.batch)

    return Variant(f"overlap {config.overlap}", step, sum(len(document.inputs) for document in documents), None)


def report_overlaps(config, options, device):
    """Print the time of plain GPT-2's evaluation at each overlap, over that of overlap 0, and that over T / (T - o)."""
    documents = [random_document(length, config.vocabulary) for length in (40_000, 9_000, 2_000)]
    plain = replace(config, vectors=0)
    overlaps = [overlap for overlap in OVERLAPS if overlap < config.segment]
    variants = [overlap_variant(replace(plain, overlap=overlap), documents, options, device) for overlap in overlaps]
    times = time_in_turn(variants, options.repeats, device)
    print(f"plain GPT-2, {sizes_line(plain, options.batch)}; documents of 40,000, 9,000 and 2,000 tokens")
    print(f"{'overlap':>7}{'seconds':>9}{'spread':>15}{'of overlap 0':>14}{'pairs':>13}{'T / (T - o)':>13}{'over it':>9}")
    for overlap, variant in zip(overlaps, variants, strict=True):
        spent, ratios = sorted(times[variant.name]), paired_ratios(times[variant.name], times["overlap 0"])
        windows = config.segment / (config.segment - overlap)
        print(f"{overlap:7d}{statistics.median(spent):9.2f}{f'{spent[0]:.2f}..{spent[-1]:.2f}':>15}"
              f"{statistics.median(ratios):14.3f}{f'{ratios[0]:.2f}..{ratios[-1]:.2f}':>13}{windows:13.3f}"
              f"{statistics.median(ratios) / windows:9.3f}")  # fmt: skip


def parse_options(argv):
    parser = OptionParser(prog="python -m accelerated.bench", allow_abbrev=False, description=__doc__.partition("\n\n")[2])
    parser.add_argument("--model", default="block_recurrent", help=f"one of {', '.join(PEERS)} (default block_recurrent)")
    parser.add_argument("--table", default="steps", help=f"one of {', '.join(TABLES)} (default steps)")
    parser.add_argument("--device", default="auto", help="auto takes a GPU where there is one")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 (autocast)")
    parser.add_argument("--batch", type=int, help="lanes (default 4; 8 of memformer and pretrained_recurrence)")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each variant (default 9)")
    options = parser.parse(argv)
    try:
        check_choice("--model", options.model, tuple(PEERS))
        check_choice("--table", options.table, TABLES)
        check_choice("--device", options.device, DEVICES)
        check_choice("--dtype", options.dtype, ("float32", "bfloat16"))
    except ValueError as error:
        raise InputError(str(error)) from None
    if options.batch is None:
        options.batch = BATCH[options.model]
    if min(options.batch, options.repeats) < 1:
        raise InputError(f"--batch {options.batch} and --repeats {options.repeats} must be at least 1")
    return options


def report_steps(config, options, device):
    """Print the model's training step beside its baseline's and its package's."""
    variants = variants_of(options.model, config, options.batch, device, options.dtype)
    dtype = getattr(torch, options.dtype)
    rate = matmul_rate(device, dtype)
    print(f"matrix products at {rate / 1e9:.0f} GFLOP/s; {sizes_line(config, options.batch)}")
    times = time_in_turn(variants, options.repeats, device)
    rate = statistics.mean([rate, matmul_rate(device, dtype)])  # before and after, since the machine's speed drifts
    report(variants, times, rate, device)


def main(argv):
    options = parse_options(argv)
    keep_freed_memory()
    device = choose_device(options.device)
    config = SIZES[options.model, device.type]
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{hardware}, torch {torch.__version__}, {options.dtype}")
    if options.table == "horizons":
        report_horizons(options.model, config, options, device)
    elif options.table == "positions":
        report_positions(options, device)
    elif options.table == "overlaps":
        report_overlaps(SIZES["pretrained_recurrence", device.type], options, device)
    else:
        report_steps(config, options, device)


if __name__ == "__main__":
    run_program("bench", main)
