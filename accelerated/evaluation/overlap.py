"""eval.py overlap: compares runs at several overlaps (Adding Recurrence to Pretrained Transformers, Tables 1 and 2)."""

import argparse
import collections
import dataclasses
import itertools
from collections.abc import Iterable

from accelerated.data.windows import cut
from accelerated.evaluation.score import TrainedRun, evaluate
from accelerated.training.fields import changed
from reference.pretrained_recurrence import Config, pooled_rows


def model_name(config: dict) -> str:
    """The model's name in the table."""
    vectors, name = (
        config["vectors"],
        f"{'recurrent' if config['vectors'] else 'GPT-2'}, window {config['segment']}",
    )
    return name + (f", {vectors} vectors" if vectors > 1 else "")


def differences(config: Config, trained: Config) -> list[str]:
    """How training differed from config; overlap and pooling do not affect how plain GPT-2 is trained."""
    fields = ("segment", "overlap", "pool") if config.vectors else ("segment",)
    pairs = ((field, getattr(trained, field)) for field in fields)
    return [
        f"trained with {field} {value}" for field, value in pairs if value != getattr(config, field)
    ]


def overlap_table(rows: list[dict]) -> list[str]:
    """The table of rows."""
    columns = "".join(
        f"   {split + ' ppl/word':>15} {'bits/byte':>9} {'log p, nats':>13}"
        for split in rows[0]["splits"]
    )
    lines = [f"{'model':<28} {'overlap':>7}{columns}   {'FLOPs/token':>11} {'counted':>9}   run"]
    for row in rows:
        line = f"{model_name(row['config']):<28} {row['config']['overlap']:7d}"
        for split in row["splits"].values():
            perplexity = f"{split['word_perplexity']:,.5g}" if split["words"] else "-"
            line += f"   {perplexity:>15} {split['bits_per_byte']:9.4f} {-split['nats']:13,.1f}"
        notes = f" ({', '.join(row['notes'])})" if row["notes"] else ""
        lines.append(
            f"{line}   {row['flops_per_token']:11.2e} {row['counted_flops_per_token']:9.2e}   {row['run']}{notes}"
        )
    return lines


def paper_flops(config: Config) -> float:
    """FLOPs per scored token in the paper: 1.75e8 T / (T - o) for GPT-2 small at T = 300.

    The paper does not say how it counts. 1.75e8 is two FLOPs for every weight of the layers plus 2 L T D for attention, to three
    digits: without the embedding and without the ends of documents.
    """
    layers = 2 * config.layers * (4 * config.width**2 + 2 * config.width * config.feed_forward)
    attention = 2 * config.layers * config.segment * config.width
    return float(f"{layers + attention:.2e}") * config.segment / (config.segment - config.overlap)


def window_flops(config: Config, length: int) -> int:
    """FLOPs of all matrix products of a forward pass over one window of `length` tokens, with logits and inserted vectors."""
    d, vectors = config.width, config.vectors
    flops = (
        config.layers * 2 * length * (4 * d * d + 2 * d * config.feed_forward)
    )  # projections and feed-forward
    flops += config.layers * 4 * length * length * d  # scores and values
    flops += 2 * length * d * config.vocabulary  # logits
    if vectors == 0:
        return flops
    flops += len(config.insertion_layers) * (
        4 * vectors * d * d + 4 * length * vectors * d
    )  # the slots' keys and values
    widths = [d, *[config.module_width] * config.module_layers, vectors * d]
    flops += sum(2 * a * b for a, b in itertools.pairwise(widths))
    return flops + (4 * pooled_rows(config, length) * d if config.pooling == "attention" else 0)


def counted_flops_per_token(config: Config, documents: Iterable) -> float:
    """FLOPs per scored token: window_flops of all windows of documents, without padding, divided by their scored tokens."""
    windows = [
        w
        for document in documents
        for w in cut(len(document.inputs) + 1, config.segment, config.overlap)
    ]
    scored = sum(window.stop + 1 - window.first for window in windows)
    sizes = collections.Counter(window.stop - window.start for window in windows)
    return sum(count * window_flops(config, size) for size, count in sizes.items()) / scored


def first_config(config: Config, sizes: dict, options: argparse.Namespace) -> Config:
    """The config with the given sizes and the first of the given overlaps; all of them are checked."""
    first, *_ = [
        changed(config, sizes | {"overlap": overlap})
        for overlap in options.overlaps or [config.overlap]
    ]
    return first


def row_of(run: TrainedRun, config: Config, options: argparse.Namespace) -> dict:
    """The row of a run that is evaluated with a config; `notes` say how evaluation differs from training."""
    run.model.config, splits = config, {}
    for split in run.splits:
        score = evaluate(
            run.model, run.to_read(split), run.tokenizer, run.lane_count, options.clear_memory
        )
        words = run.words(split)[0]
        splits[split] = {
            "word_perplexity": score.perplexity(words) if words else None,
            "words": words,
        }
        splits[split] |= {
            "bits_per_byte": score.bits_per_byte,
            "nats": score.nats,
            "tokens": score.tokens,
        }
    notes = differences(config, run.settings.model_config)
    notes += ["memory cleared"] if options.clear_memory else []
    notes += ["documents joined"] if run.carry_over else []
    notes += [
        f"a part of {split}"
        for split, documents in run.splits.items()
        if not getattr(documents, "whole", True)
    ]
    counted = counted_flops_per_token(config, itertools.chain(*map(run.to_read, run.splits)))
    row = {"run": run.path, "config": dataclasses.asdict(config), "notes": notes, "splits": splits}
    return row | {"flops_per_token": paper_flops(config), "counted_flops_per_token": counted}


def report(runs: list[TrainedRun], options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The table of all runs, each at all given overlaps or at its own."""
    rows, data = [], runs[0].data
    for run in runs:
        for overlap in dict.fromkeys(options.overlaps or [run.model.config.overlap]):
            rows.append(row_of(run, changed(run.model.config, {"overlap": overlap}), options))
    counts = [
        f"{split} {count:,} ({how})"
        for split in runs[0].splits
        for count, how in [runs[0].words(split)]
    ]
    title = f"{data}, words of the original text: {', '.join(counts)}"
    return {"data": data, "rows": rows}, [title, *overlap_table(rows)]
