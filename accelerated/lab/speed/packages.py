"""The table `packages`: a training step beside that of a public package of the same paper.

A package is timed if it is installed. docs/public.md says how to install them, and where each
computes something else than its paper. That of the Memorizing Transformer is left out: it searches
its memory on the host.
"""

import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.lab.speed.steps import step_variant
from accelerated.lab.speed.timing import measured, print_measured
from accelerated.lab.speed.variants import Variant
from accelerated.models import presets_of


def training_step(
    network: nn.Module, objective: Callable[[Tensor, Tensor], Tensor | None], options: Namespace
) -> Variant:
    """A step of a package's model: the gradient of objective(tokens, targets).

    Both are (segments, B, N). It may make its gradients itself, and return None. The type is
    bfloat16 by autocast, as the packages leave it to their users.
    """
    segments = presets_of(options.model).BENCHMARK["segments"]
    config = options.config
    shape = (segments, options.batch, config.segment + 1)
    text = torch.randint(config.vocabulary, shape, device=options.device)
    network.to(options.device).train()
    in_bfloat16 = options.dtype == "bfloat16"
    autocast = torch.autocast(options.device.type, torch.bfloat16, enabled=in_bfloat16)

    def step() -> None:
        network.zero_grad(set_to_none=False)
        with autocast:
            loss = objective(text[..., :-1], text[..., 1:])
        if loss is not None:
            loss.backward()

    return Variant(step)


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean -log p of targets (B, N), by logits (B, N, V)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def of_each(logits_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The objective of a model that reads each segment by itself: the sum of nats."""

    def objective(tokens: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(tokens, targets, strict=True)
        return torch.stack([nats(logits_of(read), aims) for read, aims in pairs]).sum()

    return objective


def block_recurrent(options: Namespace) -> Variant:
    """block-recurrent-transformer-pytorch at the same sizes."""
    from block_recurrent_transformer_pytorch import (  # pyright: ignore
        BlockRecurrentTransformer,
    )

    config = options.config
    network = BlockRecurrentTransformer(
        num_tokens=config.vocabulary,
        dim=config.width,
        depth=config.layers,
        dim_head=config.head_width,
        heads=config.heads,
        ff_mult=config.feed_forward // config.width,
        max_seq_len=config.segment,
        block_width=config.window,
        num_state_vectors=config.states,
        recurrent_layers=tuple(config.recurrent_layers),
        use_flash_attn=options.device.type == "cuda",
    )
    return training_step(network, of_each(lambda read: network(read)[0]), options)


def compressive(options: Namespace) -> Variant:
    """compressive-transformer-pytorch from full memories, as the paper has it.

    So it is without its GRU gates and its enhanced recurrence. It makes the logits of all words,
    where ours may have the adaptive softmax.
    """
    from compressive_transformer_pytorch import CompressiveTransformer  # pyright: ignore

    config = options.config
    network = CompressiveTransformer(
        num_tokens=config.vocabulary,
        dim=config.width,
        depth=config.layers,
        heads=config.heads,
        seq_len=config.segment,
        mem_len=config.memory,
        cmem_len=config.compressed_memory,
        cmem_ratio=config.compression_rate,
        gru_gated_residual=False,
        enhanced_recurrence=False,
    )
    lengths = (config.memory, config.compressed_memory)
    rows = [(config.layers, options.batch, length, config.width) for length in lengths]
    full = tuple(torch.randn(shape, device=options.device) for shape in rows)

    def objective(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = torch.zeros((), device=tokens.device)
        memories = full
        for read, aims in zip(tokens, targets, strict=True):
            network.requires_grad_()  # the package freezes its keys and values for good
            logits, memories, auxiliary = network(read, memories)
            loss = loss + nats(logits, aims) + auxiliary.sum()
        return loss

    return training_step(network, objective, options)


def memformer(options: Namespace) -> Variant:
    """memformer by its own memory replay, which has one loss, on the last segment."""
    package = importlib.import_module("memformer")  # to pyright the name is our own file's
    replay = importlib.import_module("memformer.mrbp").memory_replay_backprop

    config = options.config
    network = package.Memformer(
        dim=config.width,
        num_memory_slots=config.slots,
        mem_update_attn_heads=config.heads,
        enc_num_tokens=config.vocabulary,
        enc_depth=config.encoder_layers,
        enc_heads=config.heads,
        enc_max_seq_len=config.segment,
        dec_num_tokens=config.vocabulary,
        dec_depth=config.decoder_layers,
        dec_heads=config.heads,
        dec_max_seq_len=config.segment,
    )

    def objective(tokens: Tensor, targets: Tensor) -> None:
        read = torch.cat([*tokens], 1)  # (B, segments * N)
        replay(network, read, targets[-1])

    return training_step(network, objective, options)


def pretrained_recurrence(options: Namespace) -> Variant:
    """transformers' GPT-2, which reads the same windows, each by itself."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = options.config
    sizes = GPT2Config(
        vocab_size=config.vocabulary,
        n_positions=config.max_positions,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        n_inner=config.feed_forward,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    network: Any = GPT2LMHeadModel(sizes)

    objective = of_each(lambda read: network(read, use_cache=False).logits)
    return training_step(network, objective, options)


PACKAGES = {  # {model: (what is imported, what makes a step of it)}
    "block_recurrent": ("block_recurrent_transformer_pytorch", block_recurrent),
    "compressive": ("compressive_transformer_pytorch", compressive),
    "memformer": ("memformer", memformer),
    "pretrained_recurrence": ("transformers", pretrained_recurrence),
}


def report_packages(options: Namespace) -> None:
    """Print a row for our model and one for its package, whose steps take turns."""
    if options.model not in PACKAGES:
        print(f"{options.model}: no package is timed beside it\n")
        return
    package, make = PACKAGES[options.model]
    if importlib.util.find_spec(package) is None:
        print(f"{options.model}: {package} is not installed (docs/public.md says how)\n")
        return
    method = presets_of(options.model).BENCHMARK.get("backprop", "through_time")
    ours = partial(step_variant, options.config, method, options)
    found = measured({"ours": ours, package: partial(make, options)}, options)
    print_measured(f"a step of {options.model}", found)
