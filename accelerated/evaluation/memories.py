"""What a Compressive Transformer's memories are good for: attention by age (Figure 2), compression loss by layer (Figure 6)."""

import itertools

import torch

from accelerated.data.lanes import one_pass
from accelerated.errors import InputError
from accelerated.protocol import keep_lanes, replace_lanes

BUCKETS = 6  # of each of compressed memory, memory and segment
PARTS = ("compressed memory", "memory", "segment")


def segments_to_fill(config):
    """Segments that must have been read before no memory can hold zeros of the document's start."""
    compressed = -(-config.compressed_memory * config.compression_rate // config.segment)
    return -(-config.memory // config.segment) + compressed


@torch.no_grad()
def full_memories(model, documents, lanes, sequences):
    """Yield (tokens, state) of the lanes whose memories are full, `sequences` lanes and segments in all or as many as there are.

    Segments with positions that are not scored, such as a padded last one, are left out. Raises InputError where fewer than two
    are found.
    """
    config, device = model.config, next(model.parameters()).device
    need, found = segments_to_fill(config), 0
    state, age = model.initial_state(lanes), torch.zeros(lanes, dtype=torch.long, device=device)
    for segment, kept in one_pass(documents, lanes, config.segment):
        segment = segment.to(device)
        state = replace_lanes(segment.starts, model.initial_state(len(kept)), keep_lanes(state, kept))
        age = torch.where(segment.starts, 0, age[kept] + 1)
        own = ((age >= need) & segment.scored.all(1)).nonzero()[: sequences - found, 0]
        if len(own):
            yield segment.tokens[own], keep_lanes(state, own)
        found += len(own)
        if found >= sequences:
            return
        state = model.advance(segment.tokens, state)
    if found < 2:
        raise InputError(
            f"{found} segments have full memories, too few to average: that takes documents of more than {need + 1} segments of "
            f"{config.segment} scored tokens; give longer documents (--data) or smaller memories (--memory, --compressed-memory)"
        )


def bucket_edges(size):
    """Where the buckets of a part of `size` rows begin and end: BUCKETS of equal width, to a row."""
    return [size * bucket // BUCKETS for bucket in range(BUCKETS + 1)]


@torch.no_grad()
def attention_by_bucket(model, documents, lanes, sequences):
    """Attention weight in each bucket, summed over its keys, mean over layers, heads and queries: a row per sequence, (n, 18).

    Buckets run from old to new, as the keys do: compressed memory, memory, segment.
    """
    sizes = (model.config.compressed_memory, model.config.memory, model.config.segment)
    rows = []
    for tokens, state in full_memories(model, documents, lanes, sequences):
        buckets = []
        for part in model.usage(tokens, state)[0].mean(1).split(sizes, dim=1):  # (b, C), (b, M), (b, N)
            buckets += [part[:, a:b].sum(1) for a, b in itertools.pairwise(bucket_edges(part.shape[1]))]
        rows.append(torch.stack(buckets, 1))  # (b, 18)
    return torch.cat(rows)


def bucket_table(weights):
    """Lines of a table of attention_by_bucket's rows: mean and one standard error of the mean, in percent."""
    mean, error = weights.mean(0) * 100, weights.std(0) / len(weights) ** 0.5 * 100
    lines = [f"attention by age, % of each token's, mean (standard error) of {len(weights)} segments"]
    for index, part in enumerate(PARTS):
        if not weights[:, index * BUCKETS : (index + 1) * BUCKETS].any():
            lines.append(f"{part:<18} none")
            continue
        cells = [f"{mean[at]:6.2f} ({error[at]:.2f})" for at in range(index * BUCKETS, (index + 1) * BUCKETS)]
        total = mean[index * BUCKETS : (index + 1) * BUCKETS].sum()
        lines.append(f"{part:<18}{''.join(f'{cell:>15}' for cell in cells)}   sum {total:.1f}")
    return lines


def bucket_records(weights):
    """attention_by_bucket's rows as plain values: for each part of what is attended to, mean and standard error by age."""
    mean, error = weights.mean(0), weights.std(0) / len(weights) ** 0.5
    spans = {part: slice(index * BUCKETS, (index + 1) * BUCKETS) for index, part in enumerate(PARTS)}
    return {part: {"mean": mean[at].tolist(), "standard_error": error[at].tolist()} for part, at in spans.items()}


@torch.no_grad()
def compression_by_layer(model, documents, lanes, sequences):
    """The attention-reconstruction loss of every layer, mean over sequences, (L,); the model's config must compute it."""
    total, count = 0.0, 0
    for tokens, state in full_memories(model, documents, lanes, sequences):
        losses = model(tokens, state).auxiliary.values()
        total, count = total + torch.stack(list(losses)) * len(tokens), count + len(tokens)
    return total / count
