"""Evaluation at several overlaps: rows in the shape of Tables 1 and 2 of Adding Recurrence to Pretrained Transformers."""

import collections
import itertools
import statistics
from dataclasses import asdict
from typing import NamedTuple

from accelerated.data.windows import cut
from accelerated.evaluation.score import Score, evaluate, finite
from reference.pretrained_recurrence import pooled_rows


class Row(NamedTuple):
    """One run at one overlap."""

    run: str
    config: object  # what it was evaluated with
    notes: tuple[str, ...]  # how that differs from how it was trained
    scores: dict[str, tuple[Score, int]]  # by split, with the words of its text
    paper: float  # FLOPs per token by the paper's convention
    counted: float  # and by count, over all splits


def model_name(config):
    """How a table calls it: the windows alone for the plain model."""
    if config.vectors == 0:
        return f"GPT-2, window {config.segment}"
    return f"recurrent, window {config.segment}" + (f", {config.vectors} vectors" if config.vectors > 1 else "")


def differences(config, trained):
    """What a recurrent model meets otherwise than in training; windows of the plain one know nothing of overlap and pooling."""
    fields = ("segment", "overlap", "pool") if config.vectors else ("segment",)
    return tuple(f"{field} {getattr(trained, field)}" for field in fields if getattr(config, field) != getattr(trained, field))


def overlap_row(run, model, trained, splits, words, tokenizer, lanes, clear_memory=False):
    """The Row of a pretrained_recurrence model under model.config, trained its run's; splits {name: documents}, words by name."""
    scores = {name: (evaluate(model, own, tokenizer, lanes, clear_memory), words[name]) for name, own in splits.items()}
    notes = [f"trained with {difference}" for difference in differences(model.config, trained)]
    notes += ["memory cleared"] if clear_memory else []
    documents = [document for split in splits.values() for document in split]
    flops = (paper_flops(model.config), counted_flops_per_token(model.config, documents))
    return Row(run, model.config, tuple(notes), scores, *flops)


def overlap_record(row):
    """A Row as plain values."""
    scores = {
        split: {"word_perplexity": finite(score.perplexity(words)) if words else None, "words": words}
        | {"bits_per_byte": score.bits_per_byte, "nats": score.nats, "tokens": score.tokens}
        for split, (score, words) in row.scores.items()
    }
    flops = {"flops_per_token": row.paper, "counted_flops_per_token": row.counted}
    return {"run": str(row.run), "config": asdict(row.config), "notes": row.notes, "splits": scores} | flops


def word_perplexity(score, words, form):
    """As text, a dash where the text has no words."""
    return f"{score.perplexity(words):{form}}" if words else "-"


def overlap_table(rows):
    """Lines of a table of rows, and below it, where several runs share a line of the paper's table, their means and ranges."""
    splits = list(rows[0].scores)
    parts = "".join(f"   {split + ' ppl/word':>15} {'bits/byte':>9} {'log p, nats':>13}" for split in splits)
    lines = [f"{'model':<28} {'overlap':>7}{parts}   {'FLOPs/token':>11} {'counted':>9}   run"]
    for row in rows:
        cells = "".join(
            f"   {word_perplexity(score, words, '.5g'):>15} {score.bits_per_byte:9.4f} {-score.nats:13.1f}"
            for score, words in row.scores.values()
        )
        notes = f" ({', '.join(row.notes)})" if row.notes else ""
        name = model_name(row.config)
        lines.append(f"{name:<28} {row.config.overlap:7d}{cells}   {row.paper:11.2e} {row.counted:9.2e}   {row.run}{notes}")
    return lines + mean_lines(rows)


def mean_lines(rows):
    """Mean (least .. most) over runs of one config, evaluated alike; none where each has one run."""
    groups = {}
    for row in rows:
        groups.setdefault((row.config, row.notes), []).append(row)
    lines = []
    for (config, _), group in groups.items():
        if len(group) > 1:
            cells = []
            for split in group[0].scores:
                scores = [row.scores[split] for row in group]
                bits = spread([score.bits_per_byte for score, _ in scores], ".4f")
                words = spread([score.perplexity(words) for score, words in scores], ".5g") if scores[0][1] else "-"
                cells.append(f"{split} ppl/word {words}, bits/byte {bits}")
            lines.append(f"{model_name(config)}, overlap {config.overlap}, {len(group)} runs: {'; '.join(cells)}")
    return ["mean (least .. most):", *lines] if lines else []


def spread(values, form):
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


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
