"""eval.py positions: the loss by a token's position in its document."""

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, lengths_of
from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.evaluation.score import Score, TrainedRun, as_cell, carries_nothing, token_nats


def doubling_ranges(first: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of [0, first), [first, 2 first), [2 first, 4 first) ..., which together cover [0, length)."""
    start, stop = 0, first
    while start < length:
        yield start, min(stop, length)
        start, stop = stop, 2 * stop


def by_position(
    nats: list[np.ndarray], documents: Sequence[Document], tokenizer: Tokenizer, first: int
) -> list[dict]:
    """The loss by the predicted token's position in its document, from token_nats: a row for each of doubling_ranges.

    `documents` of a row is how many reach its range; the rest is as in Score. A document's first token is at position 0.
    """
    longest, rows = int(lengths_of(documents).max(initial=0)), []
    for start, stop in doubling_ranges(first, longest + 1) if longest else ():
        span, total, counts = (
            slice(max(start - 1, 0), stop - 1),
            0.0,
            np.zeros(3, np.int64),
        )  # documents, tokens, bytes
        for losses, document in zip(nats, documents, strict=True):
            scored = np.asarray(
                document.scored[span]
            )  # the target at i is the document's token i + 1
            targets = np.asarray(document.targets[span])[scored]
            total += float(losses[span][scored].sum())
            counts += len(scored) > 0, len(targets), tokenizer.token_bytes[targets].sum()
        reached, tokens, text_bytes = counts.tolist()
        score = Score(total, tokens, text_bytes=text_bytes)
        row = {
            "start": start,
            "stop": stop,
            "documents": reached,
            "nats": total,
            "tokens": tokens,
            "text_bytes": text_bytes,
        }
        rows.append(
            row | {"bits_per_token": score.bits_per_token, "bits_per_byte": score.bits_per_byte}
        )
    return rows


def position_lines(readings: dict[str, list[dict]]) -> list[str]:
    """The table of bits per byte of readings {label: rows of by_position}, all of the same documents."""
    labels = [f"   {label:>9}" for label in readings]
    lines = ["bits per byte by the position of the predicted token in its document"]
    lines.append(f"{'position':>21} {'documents':>10} {'tokens':>13}{''.join(labels)}")
    for rows in zip(*readings.values(), strict=True):
        place = f"{rows[0]['start']:,} to {rows[0]['stop'] - 1:,}"
        cells = "".join(
            f"{as_cell(row['bits_per_byte'], '.4f'):>{len(label)}}"
            for row, label in zip(rows, labels, strict=True)
        )
        lines.append(f"{place:>21} {rows[0]['documents']:10,d} {rows[0]['tokens']:13,d}{cells}")
    return lines


def draw_positions(path: str, readings: dict[str, list[dict]], reach: int) -> None:
    """Draw readings {label: rows of by_position}, a line each; reach is how many tokens back attention looks."""
    figure, [axes] = new_figure()
    for label, rows in readings.items():
        shown = [row for row in rows if row["text_bytes"]]
        middles = [(row["start"] + row["stop"]) / 2 for row in shown]
        axes.plot(
            middles, [row["bits_per_byte"] for row in shown], marker="o", markersize=4, label=label
        )
    axes.axvline(
        reach,
        color="0.4",
        linestyle="--",
        linewidth=1,
        label=f"reach of attention, {reach:,} tokens",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.set(
        title="Loss by position in the document",
        xlabel="position of the predicted token (tokens, middle of its range)",
    )
    axes.set_ylabel("loss (bits per byte)")
    axes.legend(frameon=False)
    save_figure(figure, path)


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The loss by position with the memory carried and, if there is one, with it cleared."""
    model, readings = run.model, {}
    for label, clear in (("memory carried", False), ("cleared", True)):
        if not (clear and carries_nothing(model)):
            nats = run.by_document(
                token_nats(model, run.documents, run.lane_count, clear_memory=clear)
            )
            readings[label] = by_position(
                nats, run.splits[run.split], run.tokenizer, model.config.segment
            )
    if options.plot:
        draw_positions(options.plot, readings, model.attention_reach)
    record = {"by_position": {label.replace(" ", "_"): rows for label, rows in readings.items()}}
    lines = [*position_lines(readings), f"attention reaches {model.attention_reach:,} tokens back"]
    return record | {"attention_reach": model.attention_reach}, lines
