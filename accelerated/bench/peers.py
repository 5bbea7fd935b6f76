"""Training steps of the public PyTorch packages of the same papers, for the table `steps`; each package is optional."""

from argparse import Namespace
from collections.abc import Callable

import torch

from accelerated.bench import timing
from accelerated.bench.sizes import SEGMENTS
from accelerated.bench.timing import Variant
from accelerated.training.process import autocast


def step_of_peer(model: torch.nn.Module, read: Callable, state: object, options: Namespace) -> Callable:
    """A training step of a package's model; read: (tokens, state) -> (logits, state, losses)."""
    config, count = options.config, SEGMENTS[options.model]
    segments = timing.random_segments(config.vocabulary, config.segment, options.batch, count, options.device)
    return timing.training_step(model, timing.reader_of_peer(read), segments, state, options)


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
        with autocast(options.dtype, device):
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
