"""Training steps of the public PyTorch packages of the same papers, for the table `steps`; each package is optional."""

from typing import Any

import torch
from torch.nn import functional

from accelerated.bench.sizes import SEGMENTS
from accelerated.bench.timing import Variant, counted_flops, random_segments
from accelerated.training.process import autocast


def block_recurrent_peer(config: Any, batch: int, device: torch.device, dtype: str) -> Variant:
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


def compressive_peer(config: Any, batch: int, device: torch.device, dtype: str) -> Variant:
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


def memformer_peer(config: Any, batch: int, device: torch.device, dtype: str) -> Variant:
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


def pretrained_recurrence_peer(config: Any, batch: int, device: torch.device, dtype: str) -> Variant:
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
