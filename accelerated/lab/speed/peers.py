"""The public PyTorch packages of the same papers, to be timed beside our models. Each is optional."""

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from accelerated.lab.speed.variants import Variant, random_segments


def training_step(model: torch.nn.Module, read: Callable, state: object, options: Namespace, count: int) -> Variant:
    """A step of a package's model through `count` segments; read: (tokens, state) -> (logits, state, auxiliary loss).

    It computes in bfloat16 by autocast, as the packages leave it to their users.
    """
    segments = random_segments(options.config, options.batch, count, options.device)
    autocast = torch.autocast(options.device.type, dtype=torch.bfloat16, enabled=options.dtype == "bfloat16")
    model.to(options.device)

    def step():
        model.zero_grad()
        objective, carried = 0.0, state
        with autocast:
            for segment in segments:
                logits, carried, auxiliary = read(segment.tokens, carried)
                nats = functional.cross_entropy(logits.flatten(0, 1).float(), segment.targets.flatten())
                objective = objective + nats + auxiliary
        objective.backward()

    return Variant("", step)


def block_recurrent(options: Namespace, count: int) -> Variant:
    """block-recurrent-transformer-pytorch at the same width, depth, heads, window, states and segment."""
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    c = options.config
    sizes = {"num_tokens": c.vocabulary, "dim": c.width, "depth": c.layers, "dim_head": c.head_width, "heads": c.heads}
    sizes |= {"max_seq_len": c.segment, "block_width": c.window, "num_state_vectors": c.states}
    model = BlockRecurrentTransformer(**sizes, ff_mult=c.feed_forward // c.width, recurrent_layers=c.recurrent_layers)
    return training_step(model, lambda tokens, state: (model(tokens)[0], state, 0.0), None, options, count)


def compressive(options: Namespace, count: int) -> Variant:
    """compressive-transformer-pytorch at the same sizes, without its GRU gates and enhanced recurrence, from full memories.

    An in-place detach in the package freezes its key and value projections after the first step. They are unfrozen before
    each segment, so that both sides compute the same gradients.
    """
    from compressive_transformer_pytorch import CompressiveTransformer

    c = options.config
    sizes = {"num_tokens": c.vocabulary, "dim": c.width, "depth": c.layers, "seq_len": c.segment, "mem_len": c.memory}
    sizes |= {"cmem_len": c.compressed_memory, "cmem_ratio": c.compression_rate, "heads": c.heads}
    model = CompressiveTransformer(**sizes, gru_gated_residual=False, enhanced_recurrence=False)
    rows = (c.memory, c.compressed_memory)
    full = tuple(torch.randn(c.layers, options.batch, each, c.width, device=options.device) for each in rows)

    def read(tokens, memories):
        model.requires_grad_()
        logits, memories, auxiliary = model(tokens, memories)
        return logits, memories, auxiliary.sum()

    return training_step(model, read, full, options, count)


def gpt2(options: Namespace, count: int) -> Variant:
    """transformers' GPT-2 at the same sizes, reading the same windows independently."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = options.config
    sizes = {"vocab_size": c.vocabulary, "n_positions": c.max_positions, "n_embd": c.width, "n_layer": c.layers}
    plain = {"n_head": c.heads, "n_inner": c.feed_forward, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **plain))
    return training_step(model, lambda tokens, state: (model(tokens, use_cache=False).logits, state, 0.0), None, options, count)


PEERS = {  # of a model: the package, and what makes a step of it
    "block_recurrent": ("block_recurrent_transformer_pytorch", block_recurrent),
    "compressive": ("compressive_transformer_pytorch", compressive),
    "pretrained_recurrence": ("transformers", gpt2),
}


def peer_of(options: Namespace, count: int) -> dict[str, Callable[[], Variant]]:
    """{package: what makes the Variant} of a step of a model's package through `count` segments; empty if there is none here."""
    package, make = PEERS.get(options.model, ("", None))
    return {package: partial(make, options, count)} if package and importlib.util.find_spec(package) else {}
