"""eval.py overlap: runs at several overlaps, as in Tables 1 and 2 of Adding Recurrence to Pretrained Transformers."""

import argparse
import collections
import itertools
import statistics
from dataclasses import asdict
from typing import NamedTuple

from accelerated.data.windows import cut
from accelerated.evaluation.score import Report, Run, Score, add_clear_memory, evaluate
from accelerated.training.options import changed
from accelerated.training.process import autocast
from accelerated.training.settings import GPT2_MODEL
from reference.pretrained_recurrence import Config, pooled_rows


class Row(NamedTuple):
    """One run at one overlap."""

    run: str
    config: Config  # what it was evaluated with
    notes: tuple[str, ...]  # how that differs from how it was trained
    scores: dict[str, tuple[Score, int]]  # by split, with the words of its text
    paper: float  # FLOPs per token by the paper's convention
    counted: float  # and by count, over all splits


def model_name(config: Config) -> str:
    """How a table calls it: the windows alone for the plain model."""
    if config.vectors == 0:
        return f"GPT-2, window {config.segment}"
    return f"recurrent, window {config.segment}" + (f", {config.vectors} vectors" if config.vectors > 1 else "")


def differences(config: Config, trained: Config) -> tuple[str, ...]:
    """How a recurrent model was trained otherwise; windows of the plain one know nothing of overlap and pooling."""
    fields = ("segment", "overlap", "pool") if config.vectors else ("segment",)
    return tuple(f"{field} {getattr(trained, field)}" for field in fields if getattr(config, field) != getattr(trained, field))


def row_of(run: Run, config: Config, clear_memory: bool) -> Row:
    """The Row of a run whose model reads as config says."""
    run.model.config = config
    scores = {
        split: (evaluate(run.model, documents, run.tokenizer, run.lanes, clear_memory), run.words(split)[0])
        for split, documents in run.splits.items()
    }
    notes = [f"trained with {difference}" for difference in differences(config, run.settings.model_config)]
    notes += ["memory cleared"] if clear_memory else []
    documents = itertools.chain(*run.splits.values())
    return Row(run.path, config, tuple(notes), scores, paper_flops(config), counted_flops_per_token(config, documents))


def overlap_record(row: Row) -> dict:
    """A Row as plain values."""
    scores = {
        split: {"word_perplexity": score.perplexity(words) if words else None, "words": words}
        | {"bits_per_byte": score.bits_per_byte, "nats": score.nats, "tokens": score.tokens}
        for split, (score, words) in row.scores.items()
    }
    flops = {"flops_per_token": row.paper, "counted_flops_per_token": row.counted}
    return {"run": row.run, "config": asdict(row.config), "notes": row.notes, "splits": scores} | flops


def word_perplexity(score: Score, words: int) -> str:
    """As text, a dash if the text has no words."""
    return f"{score.perplexity(words):.5g}" if words else "-"


def overlap_table(rows: list[Row]) -> list[str]:
    """The table of rows, and below it, if several runs share a line of the paper's table, their means and ranges."""
    parts = "".join(f"   {split + ' ppl/word':>15} {'bits/byte':>9} {'log p, nats':>13}" for split in rows[0].scores)
    lines = [f"{'model':<28} {'overlap':>7}{parts}   {'FLOPs/token':>11} {'counted':>9}   run"]
    for row in rows:
        cells = "".join(
            f"   {word_perplexity(score, words):>15} {score.bits_per_byte:9.4f} {-score.nats:13.1f}"
            for score, words in row.scores.values()
        )
        notes = f" ({', '.join(row.notes)})" if row.notes else ""
        name = model_name(row.config)
        lines.append(f"{name:<28} {row.config.overlap:7d}{cells}   {row.paper:11.2e} {row.counted:9.2e}   {row.run}{notes}")
    return lines + mean_lines(rows)


def mean_lines(rows: list[Row]) -> list[str]:
    """Mean (least .. most) over runs of one config, evaluated alike; none if each has one run."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.config, row.notes].append(row)
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


def spread(values: list[float], form: str) -> str:
    """Mean (least .. most)."""
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


def paper_flops(config: Config) -> float:
    """FLOPs per token scored, as the paper has them: 1.75e8 T / (T - o) for GPT-2 small at T = 300.

    1.75e8 is two FLOPs for every weight of the layers plus the attention scores' 2 L T D, to three digits; the embedding, the
    values' share of attention and the recurrence module are left out, and documents have no end.
    """
    layers = 2 * config.layers * (4 * config.width**2 + 2 * config.width * config.feed_forward)
    attention = 2 * config.layers * config.segment * config.width
    return float(f"{layers + attention:.2e}") * config.segment / (config.segment - config.overlap)


def window_flops(config: Config, length: int) -> int:
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


def counted_flops_per_token(config: Config, documents) -> float:
    """window_flops of all windows of documents, without padding, over the documents' tokens after their first."""
    windows = [w for document in documents for w in cut(len(document.inputs) + 1, config.segment, config.overlap)]
    scored = sum(window.scored for window in windows)
    sizes = collections.Counter(window.stop - window.start for window in windows)
    return sum(count * window_flops(config, size) for size, count in sizes.items()) / scored


OWN = "own"


def overlaps(text: str) -> tuple[int, ...] | str:
    """'0,5,10' -> (0, 5, 10); 'own' as it is."""
    try:
        return OWN if text == OWN else tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; give overlaps joined by commas, like 0,5,10, or {OWN}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overlaps", type=overlaps, default=OWN, metavar="O,...",
        help="tokens that a window reads again, each from 0 to one less than the window (default own: each run's)",
    )  # fmt: skip
    add_clear_memory(parser)


def configs(config: Config, sizes: dict, options: argparse.Namespace) -> list[Config]:
    """The config with other sizes, once for each overlap that is asked for."""
    wanted = [config.overlap] if options.overlaps == OWN else options.overlaps
    return [changed(config, sizes | {"overlap": overlap}) for overlap in wanted]


def report(*runs: Run, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The table of all runs at all overlaps."""
    rows = []
    for run in runs:
        with autocast(run.settings.training.dtype, next(run.model.parameters()).device):
            rows += [row_of(run, config, options.clear_memory) for config in configs(run.model.config, {}, options)]
    counts = [f"{split} {count:,} ({how})" for split in runs[0].splits for count, how in [runs[0].words(split)]]
    title = f"{runs[0].data}, words of the original text: {', '.join(counts)}"
    return {"data": runs[0].data, "rows": [overlap_record(row) for row in rows]}, [title, *overlap_table(rows)]


REPORT = Report(
    "a table of pretrained_recurrence runs at several overlaps of their windows", "RUN RUN --overlaps 0,5", report,
    add_options, lambda *given: configs(*given)[0], model=GPT2_MODEL, splits=("valid", "test"),
)  # fmt: skip
