"""eval.py attention and compression: Figures 2 and 6 of Compressive Transformers.

They show attention by age of the memory, and compression loss by layer.
"""

import argparse
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from accelerated.compressive import Compressive, State
from accelerated.data.windows import Document
from accelerated.evaluation.score import Answer, TrainedRun, carried_through
from accelerated.program.errors import InputError
from accelerated.training.fields import changed
from reference.compressive import Config

BUCKETS = 6  # in each of PARTS
PARTS = ("compressed memory", "memory", "segment")


def full_memories(
    model: Compressive, documents: Sequence[Document], lanes: int, sequences: int
) -> Iterator[tuple[Tensor, State]]:
    """Yield (tokens, state) of lanes with full memories and all tokens scored.

    There are `sequences` in all; raises InputError if there are fewer than 2.
    """
    if model.config.memories:
        raise InputError(
            "this run's layers have different memories, and this report averages over layers of "
            "equal ones; expected a run without --memories"
        )
    c = model.config
    # How many segments to read until no row is a zero of the start
    need = math.ceil(c.memory / c.segment)
    need += math.ceil(c.compressed_memory / max(1, c.new_rows))
    device = model.embedding.device
    taken = 0
    for segment, number, state, _ in carried_through(model, documents, lanes, predict=False):
        is_full = (number >= need) & segment.scored.numpy().all(1)
        rows = np.flatnonzero(is_full)[: sequences - taken].tolist()
        if rows:
            yield segment.tokens[rows].to(device), State._make(field[rows] for field in state)
        taken += len(rows)
        if taken >= sequences:
            return
    if taken < 2:
        raise InputError(
            "fewer than two segments have full memories, too few to average; give "
            f"documents (--data) of more than {need + 1:,} segments, or smaller memories"
        )


def by_bucket(part: Tensor) -> Tensor:
    """The sums of a part (b, keys) over its equal BUCKETS (b, 6); an edge may divide a key."""
    pieces = part.repeat_interleave(BUCKETS, 1) / BUCKETS
    return pieces.unflatten(1, (BUCKETS, part.shape[1])).sum(2)


def usage_by_layer(model: Compressive, tokens: Tensor, state: State) -> Tensor:
    """Each key's attention weight, averaged over heads and queries, by layer (B, L, K).

    All layers must have as many rows.
    """
    h = model.embed(tokens)
    sinusoids = model.dropped_sinusoids()
    usages = []
    for index, layer in enumerate(model.layers):
        memory, compressed = model.memories_of(state, index)
        projected = layer.project(h, torch.cat([compressed, memory], 1))
        distances = layer.project_distances(sinusoids)
        attended, usage = layer.attend(*projected, distances, measure=True)
        usages.append(usage)
        h = layer.mix(h, attended)
    return torch.stack(usages, 1)


@torch.no_grad()
def attention_by_bucket(
    model: Compressive, documents: Sequence[Document], lanes: int, sequences: int
) -> Tensor:
    """Each bucket's attention weight for n segments (n, 18).

    It is summed over keys, averaged over layers, heads and queries.
    """
    c = model.config
    sizes = (c.compressed_memory, c.memory, c.segment)  # from old to new, like the keys
    rows = []
    for tokens, state in full_memories(model, documents, lanes, sequences):
        usage = usage_by_layer(model, tokens, state)
        parts = usage.mean(1).split(sizes, dim=1)  # (b, C), (b, M), (b, N)
        rows.append(torch.cat([by_bucket(part) for part in parts], 1))  # (b, 18)
    return torch.cat(rows)


def bucket_table(weights: Tensor) -> Answer:
    """Means and standard errors of attention_by_bucket's rows: (record, lines in percent)."""
    mean = weights.mean(0).view(len(PARTS), BUCKETS)
    error = (weights.std(0) / len(weights) ** 0.5).view(len(PARTS), BUCKETS)
    what = "attention by age, % of a token's attention, mean (standard error)"
    ages = ["1 (oldest)", *map(str, range(2, BUCKETS)), f"{BUCKETS} (newest)"]
    head = f"{'sixth of its rows':<18}" + "".join(f"{age:>15}" for age in ages)
    lines = [f"{what} of {len(weights):,} segments", head]
    record = {}
    for part, means, errors in zip(PARTS, mean.tolist(), error.tolist(), strict=True):
        record[part] = {"mean": means, "standard_error": errors}
        pairs = zip(means, errors, strict=True)
        cells = [f"{100 * share:6.2f} ({100 * deviation:.2f})" for share, deviation in pairs]
        lines.append(f"{part:<18}" + "".join(f"{cell:>15}" for cell in cells))
    return {"attention": record}, lines


@torch.no_grad()
def compression_by_layer(
    model: Compressive, documents: Sequence[Document], lanes: int, sequences: int
) -> Tensor:
    """The attention-reconstruction loss of each layer, averaged over segments (L,).

    The model's config must ask for that loss.
    """
    total = torch.zeros(())
    count = 0
    for tokens, state in full_memories(model, documents, lanes, sequences):
        losses = model.read(tokens, state).auxiliary
        total = total + torch.stack(list(losses.values())) * len(tokens)
        count += len(tokens)
    return total / count


def reconstructing(config: Config, sizes: dict, options: argparse.Namespace) -> Config:
    """The config with the given sizes and attention reconstruction as its auxiliary losses."""
    config = changed(config, sizes | {"compression_loss": "attention_reconstruction"})
    if not config.compressed_memory:
        raise InputError(
            "compression: compressed_memory is 0, so nothing is compressed; "
            "give a run with compressed memory"
        )
    return config


def opened(run: TrainedRun) -> tuple[Compressive, Sequence[Document], int]:
    """The model, and what it reads in how many lanes."""
    assert isinstance(run.model, Compressive)
    return run.model, run.documents, run.lane_count


def report_attention(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """How much attention goes to six ages each of compressed memory, memory and segment."""
    return bucket_table(attention_by_bucket(*opened(run), options.sequences))


def report_compression(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """The attention-reconstruction loss of each layer."""
    losses = compression_by_layer(*opened(run), options.sequences).tolist()
    lines = []
    for layer, loss in enumerate(losses, start=1):
        lines.append(f"layer {layer:<3} attention-reconstruction loss {loss:.3e}")
    return {"attention_reconstruction_loss": losses}, lines
