"""Evaluation at several overlaps: rows in the shape of Tables 1 and 2 of Adding Recurrence to Pretrained Transformers."""

import statistics
from typing import NamedTuple

from accelerated.evaluation import Score, count_words, evaluate
from accelerated.flops import counted_flops_per_token, paper_flops


class Row(NamedTuple):
    """One run at one overlap."""

    run: str
    model: str  # plain GPT-2, or what is inserted
    overlap: int
    trained: int | None  # the overlap that the run was trained with, where that matters and is another
    scores: dict[str, tuple[Score, int]]  # by split, with the words of its text
    paper: float  # FLOPs per token by the paper's convention
    counted: float  # and by count


def model_name(config):
    """How a table calls it: the windows alone for the plain model."""
    if config.vectors == 0:
        return f"GPT-2, window {config.segment}"
    return f"recurrent, window {config.segment}" + (f", {config.vectors} vectors" if config.vectors > 1 else "")


def overlap_row(run, model, trained, splits, tokenizer, lanes):
    """The Row of a pretrained_recurrence model, at its config's overlap; splits {name: documents}, trained its run's overlap."""
    config, documents = model.config, [document for split in splits.values() for document in split]
    scores = {name: (evaluate(model, own, tokenizer, lanes), count_words(own)) for name, own in splits.items()}
    other = trained if config.vectors and trained != config.overlap else None
    return Row(
        run, model_name(config), config.overlap, other, scores, paper_flops(config), counted_flops_per_token(config, documents)
    )


def word_perplexities(row):
    return {split: score.word_perplexity(words) for split, (score, words) in row.scores.items()}


def overlap_table(rows):
    """Lines of a table of rows, and below it, where several runs share a line of the paper's table, their means and ranges."""
    splits = list(rows[0].scores)
    parts = "".join(f"   {split + ' ppl/word':>15} {'bits/byte':>9} {'log p, nats':>13}" for split in splits)
    lines = [f"{'model':<28} {'overlap':>7}{parts}   {'FLOPs/token':>11} {'counted':>9}   run"]
    for row in rows:
        cells = "".join(
            f"   {score.word_perplexity(words):15.5g} {score.bits_per_byte:9.4f} {-score.nats:13.1f}"
            for score, words in row.scores.values()
        )
        note = "" if row.trained is None else f" (trained with overlap {row.trained})"
        lines.append(f"{row.model:<28} {row.overlap:7d}{cells}   {row.paper:11.2e} {row.counted:9.2e}   {row.run}{note}")
    return lines + mean_lines(rows)


def mean_lines(rows):
    """Mean (least .. most) over runs of the same model and overlap; none where each has one run."""
    groups = {}
    for row in rows:
        groups.setdefault((row.model, row.overlap, row.trained), []).append(row)
    lines = []
    for (model, overlap, _), group in groups.items():
        if len(group) > 1:
            cells = []
            for split in group[0].scores:
                values = [word_perplexities(row)[split] for row in group]
                bits = [row.scores[split][0].bits_per_byte for row in group]
                cells.append(f"{split} ppl/word {spread(values, '.5g')}, bits/byte {spread(bits, '.4f')}")
            lines.append(f"{model}, overlap {overlap}, {len(group)} runs: {'; '.join(cells)}")
    return ["mean (least .. most):", *lines] if lines else []


def spread(values, form):
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} .. {max(values):{form}})"
