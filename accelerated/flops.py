"""What reading a token costs a GPT-2 with windows: by the paper's convention, and counted (Adding Recurrence, Tables 1 and 2)."""

import collections
import itertools

from accelerated.windows import cut
from reference.pretrained_recurrence import pooled_rows


def paper_flops(config):
    """FLOPs per token scored, as the paper has them: 1.75e8 T / (T - o) for GPT-2 small at T = 300.

    1.75e8 is two FLOPs for every weight of the layers plus the attention scores' 2 L T D, to three digits; the embedding, the
    values' share of attention and the recurrence module are left out, and documents have no end.
    """
    layers = 2 * config.layers * (4 * config.width**2 + 2 * config.width * config.feed_forward)
    attention = 2 * config.layers * config.segment * config.width
    return float(f"{layers + attention:.2e}") * config.segment / (config.segment - config.overlap)


def window_flops(config, length):
    """FLOPs of all matrix products of a forward pass over one window of `length` tokens, with its logits and its vectors."""
    d, vectors = config.width, config.vectors
    flops = config.layers * 2 * length * (4 * d * d + 2 * d * config.feed_forward)  # projections and feed-forward
    flops += config.layers * 4 * length * length * d  # scores and values
    flops += 2 * length * d * config.vocabulary  # logits
    if vectors == 0:
        return flops
    flops += len(config.insertion_layers) * (4 * vectors * d * d + 4 * length * vectors * d)  # the slots' keys and values
    widths = [d, *[config.module_width] * config.module_layers, vectors * d]
    flops += sum(2 * a * b for a, b in itertools.pairwise(widths))
    return flops + (4 * pooled_rows(config, length) * d if config.pooling == "attention" else 0)


def counted_flops_per_token(config, documents):
    """window_flops of all windows of documents, without padding, over the documents' tokens after their first."""
    windows = [w for document in documents for w in cut(len(document.inputs) + 1, config.segment, config.overlap)]
    scored = sum(window.scored for window in windows)
    sizes = collections.Counter(window.stop - window.start for window in windows)
    return sum(count * window_flops(config, size) for size, count in sizes.items()) / scored
