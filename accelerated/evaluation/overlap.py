"""eval.py overlap: compares runs at several overlaps.

Tables 1 and 2 of Adding Recurrence to Pretrained Transformers.
"""

import argparse
import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable

from accelerated.data.windows import Document, cut
from accelerated.evaluation.score import Answer, TrainedRun, as_cell, evaluate, score_record
from accelerated.program.errors import InputError
from accelerated.training.fields import changed
from reference.pretrained_recurrence import Config
from reference.variants.pretrained_recurrence import pooled_rows


def model_name(config: dict) -> str:
    """The model's name in the table."""
    vectors = config["vectors"]
    plain = "plain decoder" if "base" in config else "GPT-2"
    name = f"{'recurrent' if vectors else plain}, window {config['segment']}"
    return f"{name}, {vectors} vectors" if vectors > 1 else name


def overlap_table(rows: list[dict]) -> list[str]:
    """The table of rows."""
    title = f"{'model':<28} {'overlap':>7}"
    for split in rows[0]["splits"]:
        title += f"   {split + ' ppl/word':>15} {'bits/byte':>9} {'log p, nats':>13}"
    lines = [f"{title}   {'FLOPs/token':>11} {'counted':>9}   run"]
    for row in rows:
        line = f"{model_name(row['config']):<28} {row['config']['overlap']:7d}"
        for split in row["splits"].values():
            perplexity = as_cell(split.get("word_perplexity", math.nan), ",.5g")
            line += f"   {perplexity:>15} {split['bits_per_byte']:9.4f} {-split['nats']:13,.1f}"
        flops = as_cell(row.get("flops_per_token", math.nan), ".2e")
        counted = as_cell(row.get("counted_flops_per_token", math.nan), ".2e")
        notes = f" ({', '.join(row['notes'])})" if row["notes"] else ""
        lines.append(f"{line}   {flops:>11} {counted:>9}   {row['run']}{notes}")
    return lines


def paper_flops(config: Config) -> float:
    """FLOPs per scored token in the paper: 1.75e8 T / (T - o) for GPT-2 small at T = 300.

    The paper does not say how it counts. 1.75e8 is two FLOPs for every weight of the layers plus 2
    L T D for attention, to three digits: without the embedding and the ends of documents.
    """
    d = config.width
    layers = 2 * config.layers * (4 * d**2 + 2 * d * config.feed_forward)
    attention = 2 * config.layers * config.segment * d
    per_token = float(f"{layers + attention:.2e}")
    return per_token * config.segment / (config.segment - config.overlap)


def window_flops(config: Config, length: int) -> int:
    """FLOPs of all matrix products of a forward pass over one window of `length` tokens.

    They include those of logits and inserted vectors.
    """
    d = config.width
    vectors = config.vectors
    weights = 4 * d * d + 2 * d * config.feed_forward  # of a layer
    flops = config.layers * 2 * length * weights
    flops += config.layers * 4 * length * length * d  # scores and values
    flops += 2 * length * d * config.vocabulary  # logits
    if vectors == 0:
        return flops

    slots = 4 * vectors * d * d + 4 * length * vectors * d  # their keys and values, read by each
    flops += len(config.insertion_layers) * slots
    widths = [d, *[config.module_width] * config.module_layers, vectors * d]
    flops += sum(2 * a * b for a, b in itertools.pairwise(widths))
    if config.pooling == "attention":
        flops += 4 * pooled_rows(config, length) * d
    return flops


def counted_flops_per_token(config: Config, documents: Iterable[Document]) -> float:
    """FLOPs per scored token: window_flops of all windows of documents over their scored tokens.

    Padding does not count.
    """
    scored = 0
    sizes = collections.Counter()  # of windows
    for document in documents:
        for window in cut(len(document.inputs) + 1, config.segment, config.overlap):
            scored += window.stop + 1 - window.first
            sizes[window.stop - window.start] += 1
    flops = sum(count * window_flops(config, size) for size, count in sizes.items())
    return flops / scored


def first_config(config: Config, sizes: dict, options: argparse.Namespace) -> Config:
    """The config with the given sizes and the first of the given overlaps; all are checked."""
    if options.overlaps and "overlap" in sizes:
        raise InputError("--overlap and --overlaps both say what to read again; leave one out")
    overlaps = options.overlaps or [sizes.get("overlap", config.overlap)]
    configs = [changed(config, sizes | {"overlap": overlap}) for overlap in overlaps]
    return configs[0]


def row_of(run: TrainedRun, config: Config, options: argparse.Namespace) -> dict:
    """The row of a run that is evaluated with a config."""
    run.model.config = config
    splits = {}
    for split in run.splits:
        documents = run.to_read(split)
        score = evaluate(run.model, documents, run.tokenizer, run.lane_count, options.clear_memory)
        splits[split] = score_record(score, run.words(split))
    row = {
        "run": run.path,
        "config": dataclasses.asdict(config),
        "notes": notes_of(run, config, options),
        "splits": splits,
    }
    if hasattr(config, "base"):  # the formulas are GPT-2's
        return row
    all_documents = itertools.chain.from_iterable(map(run.to_read, run.splits))
    row["flops_per_token"] = paper_flops(config)
    row["counted_flops_per_token"] = counted_flops_per_token(config, all_documents)
    return row


def notes_of(run: TrainedRun, config: Config, options: argparse.Namespace) -> list[str]:
    """How the evaluation of a run differs from its training.

    Overlap and pooling do not affect how plain GPT-2 is trained.
    """
    notes = []
    for field in ("segment", "overlap", "pool") if config.vectors else ("segment",):
        value = getattr(run.settings.model_config, field)
        if value != getattr(config, field):
            notes.append(f"trained with {field} {value}")
    if options.clear_memory:
        notes.append("memory cleared")
    if run.carry_over:
        notes.append("documents joined")
    for split, documents in run.splits.items():
        if not documents.whole:
            notes.append(f"a part of {split}")
    return notes


def report(runs: list[TrainedRun], options: argparse.Namespace) -> Answer:
    """The table of all runs, each at all given overlaps or at its own."""
    rows = []
    for run in runs:
        config = run.model.config
        assert isinstance(config, Config)  # REPORTS says so
        for overlap in dict.fromkeys(options.overlaps or [config.overlap]):
            rows.append(row_of(run, changed(config, {"overlap": overlap}), options))
    first = runs[0]
    counts = []
    for split in first.splits:
        words, way = first.words(split)
        counts.append(f"{split} {words:,} ({way})")
    data = first.data
    title = f"{data}, words of the original text: {', '.join(counts)}"
    return {"data": data, "rows": rows}, [title, *overlap_table(rows)]
