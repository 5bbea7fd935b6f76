"""eval.py attention and compression: attention by age of the memory (Figure 2), compression loss by layer (Figure 6)."""

import argparse
import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from accelerated.data.windows import Document
from accelerated.evaluation.score import TrainedRun, carried_through
from accelerated.program.errors import InputError
from accelerated.protocol import keep_lanes
from accelerated.training.options import changed
from reference.compressive import Config

BUCKETS = 6  # in each of PARTS
PARTS = ("compressed memory", "memory", "segment")


def segments_to_fill(config: Config) -> int:
    """How many segments to read until the memories are full, without zeros from the document's start."""
    compressed = -(-config.compressed_memory * config.compression_rate // config.segment)
    return -(-config.memory // config.segment) + compressed


def full_memories(
    model: Module, documents: Sequence[Document], lanes: int, sequences: int
) -> Iterator[tuple[Tensor, tuple]]:
    """Yield (tokens, state) of lanes with full memories and all tokens scored, `sequences` in all; InputError if below 2."""
    need, taken = segments_to_fill(model.config), 0
    for segment, number, state, _ in carried_through(model, documents, lanes, predict=False):
        full_lanes = np.flatnonzero((number >= need) & segment.scored.numpy().all(1))[
            : sequences - taken
        ].tolist()
        if full_lanes:
            yield segment.tokens[full_lanes].to(state.memory.device), keep_lanes(state, full_lanes)
        taken += len(full_lanes)
        if taken >= sequences:
            return
    if taken < 2:
        raise InputError(
            f"{'1 segment has' if taken else '0 segments have'} full memories, too few to average; expected documents of more "
            f"than {need + 1:,} segments of {model.config.segment:,} scored tokens; give longer documents (--data) or smaller "
            f"memories (--memory, --compressed-memory)"
        )


def bucket_shares(size: int) -> Tensor:
    """How much of each row of a part with `size` rows is in each of its equal BUCKETS (size, 6); an edge may divide a row."""
    rows, edges = torch.arange(size)[:, None], torch.arange(BUCKETS + 1) * size / BUCKETS
    return (torch.minimum(rows + 1, edges[1:]) - torch.maximum(rows, edges[:-1])).clamp(min=0)


@torch.no_grad()
def attention_by_bucket(
    model: Module, documents: Sequence[Document], lanes: int, sequences: int
) -> Tensor:
    """Each bucket's attention weight for n segments (n, 18): summed over keys, averaged over layers, heads and queries."""
    sizes = (
        model.config.compressed_memory,
        model.config.memory,
        model.config.segment,
    )  # from old to new, like the keys
    of_buckets, rows = [bucket_shares(size).to(next(model.parameters())) for size in sizes], []
    for tokens, state in full_memories(model, documents, lanes, sequences):
        parts = model.usage(tokens, state).mean(1).split(sizes, dim=1)  # (b, C), (b, M), (b, N)
        rows.append(
            torch.cat([part @ of_part for part, of_part in zip(parts, of_buckets, strict=True)], 1)
        )  # (b, 18)
    return torch.cat(rows)


def bucket_table(weights: Tensor) -> tuple[dict, list[str]]:
    """Means and standard errors of attention_by_bucket's rows by age: (record, lines in percent)."""
    mean, error = (
        x.view(len(PARTS), BUCKETS) for x in (weights.mean(0), weights.std(0) / len(weights) ** 0.5)
    )
    record, lines = (
        {},
        [
            f"attention by age, % of a token's attention, mean (standard error) of {len(weights):,} segments"
        ],
    )
    ages = ["1 (oldest)", *map(str, range(2, BUCKETS)), f"{BUCKETS} (newest)"]
    lines.append(f"{'sixth of its rows':<18}" + "".join(f"{age:>15}" for age in ages))
    for part, means, errors in zip(PARTS, mean, error, strict=True):
        record[part] = {
            "mean": means.tolist(),
            "standard_error": errors.tolist(),
            "sum": means.sum().item(),
        }
        pairs = zip((means * 100).tolist(), (errors * 100).tolist(), strict=True)
        cells = "".join(
            f"{f'{percent:6.2f} ({deviation:.2f})':>15}" for percent, deviation in pairs
        )
        lines.append(
            f"{part:<18}" + (f"{cells}   sum {means.sum() * 100:.1f}" if means.any() else " none")
        )
    return {"attention": record}, lines


@torch.no_grad()
def compression_by_layer(
    model: Module, documents: Sequence[Document], lanes: int, sequences: int
) -> Tensor:
    """Of each layer the attention-reconstruction loss and its target's mean square (2, L), averaged over segments.

    The model's config must ask for that loss.
    """
    total, count, blank = 0.0, 0, copy.deepcopy(model)
    for layer in (
        blank.layers
    ):  # compresses to zeros, of which attention makes zeros: the difference is the target
        layer.compression.register_forward_hook(
            lambda compression, given, new: torch.zeros_like(new)
        )
    for tokens, state in full_memories(model, documents, lanes, sequences):
        losses = [
            torch.stack([*each.read(tokens, state).auxiliary.values()]) for each in (model, blank)
        ]
        total, count = total + torch.stack(losses) * len(tokens), count + len(tokens)
    return total / count


def reconstructing(config: Config, sizes: dict, options: argparse.Namespace) -> Config:
    """The config with the given sizes and attention reconstruction as its auxiliary losses."""
    config = changed(config, sizes | {"compression_loss": "attention_reconstruction"})
    if not config.compressed_memory:
        raise InputError(
            "compression: compressed_memory is 0, so nothing is compressed; give a run with compressed memory"
        )
    return config


def report_attention(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """How much attention goes to six ages each of compressed memory, memory and segment."""
    return bucket_table(
        attention_by_bucket(run.model, run.documents, run.lane_count, options.sequences)
    )


def report_compression(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The attention-reconstruction loss of each layer, and what part it is of the mean square of what is reconstructed."""
    losses, targets = compression_by_layer(
        run.model, run.documents, run.lane_count, options.sequences
    )
    record = {
        "attention_reconstruction_loss": losses.tolist(),
        "part_of_target": (losses / targets).tolist(),
    }
    rows = enumerate(zip(*record.values(), strict=True), start=1)
    lines = [
        f"layer {n:<3} attention-reconstruction loss {loss:.3e}, {part:.3f} of its target"
        for n, (loss, part) in rows
    ]
    return record, lines
