"""eval.py positions: the loss by how far into its document a token stands."""

import argparse
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from accelerated.evaluation.score import Report, Run, as_cell, carries_nothing, ratio, token_nats
from accelerated.training.log import new_figure, save_figure


class PositionRow(NamedTuple):
    """Predictions of the tokens at positions start .. stop - 1 of their documents, the first token being position 0."""

    start: int
    stop: int
    documents: int  # that have a token to predict there
    nats: float  # summed -log p of the scored tokens
    tokens: int  # scored tokens
    text_bytes: int  # bytes of text that the scored tokens spell
    bits_per_token: float
    bits_per_byte: float


def doubling_ranges(first: int, length: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of [0, first), [first, 2 first), [2 first, 4 first) ... that together are [0, length)."""
    start, stop = 0, first
    while start < length:
        yield start, min(stop, length)
        start, stop = stop, 2 * stop


def by_position(nats: list[np.ndarray], documents, tokenizer, first: int) -> list[PositionRow]:
    """The loss by how far into its document the predicted token stands: a row for each of doubling_ranges(first, ...).

    nats are token_nats of the documents. Does the loss keep falling past what attention reaches? Only longer documents have later
    ranges, and those may be easier: compare with a second reading of the same documents, the memory cleared.
    """
    longest = max((len(document.inputs) for document in documents), default=0)
    ranges = list(doubling_ranges(first, longest + 1 if longest else 0))
    sums, counts = [0.0] * len(ranges), np.zeros((len(ranges), 3), np.int64)  # documents, tokens, bytes
    for losses, document in zip(nats, documents, strict=True):
        for index, (start, stop) in enumerate(ranges):
            span = slice(max(start - 1, 0), stop - 1)  # the target at i is the document's token i + 1
            scored = document.scored[span]
            targets = document.targets[span][scored]
            sums[index] += float(losses[span][scored].sum())
            counts[index] += len(scored) > 0, len(targets), tokenizer.token_bytes[targets].sum()
    rows = []
    for (start, stop), total, (reached, tokens, text_bytes) in zip(ranges, sums, counts.tolist(), strict=True):
        bits = total / math.log(2)
        rows.append(PositionRow(start, stop, reached, total, tokens, text_bytes, ratio(bits, tokens), ratio(bits, text_bytes)))
    return rows


def position_lines(readings: dict[str, list[PositionRow]]) -> list[str]:
    """The table of readings {label: rows of by_position}, which are all of the same documents: bits per byte."""
    widths = [max(len(label), 9) for label in readings]
    labels = "".join(f"   {label:>{width}}" for label, width in zip(readings, widths, strict=True))
    lines = ["bits per byte by the position of the predicted token in its document"]
    lines.append(f"{'position':>21} {'documents':>10} {'tokens':>13}{labels}")
    for rows in zip(*readings.values(), strict=True):
        place = f"{rows[0].start:,} to {rows[0].stop - 1:,}"
        cells = "".join(f"   {as_cell(row.bits_per_byte, '.4f'):>{width}}" for row, width in zip(rows, widths, strict=True))
        lines.append(f"{place:>21} {rows[0].documents:10,d} {rows[0].tokens:13,d}{cells}")
    return lines


def draw_positions(path: str, readings: dict[str, list[PositionRow]], reach: int) -> None:
    """Draw readings {label: rows of by_position}, a line each; reach is how many tokens back attention looks."""
    figure, axes = new_figure()
    for label, rows in readings.items():
        shown = [row for row in rows if row.text_bytes]
        middles = [(row.start + row.stop) / 2 for row in shown]
        axes.plot(middles, [row.bits_per_byte for row in shown], marker="o", markersize=4, label=label)
    axes.axvline(reach, color="0.4", linestyle="--", linewidth=1, label=f"reach of attention, {reach:,} tokens")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.set(title="Loss by position in the document", xlabel="position of the predicted token (tokens, middle of its range)")
    axes.set_ylabel("loss (bits per byte)")
    axes.legend(frameon=False)
    save_figure(figure, path)


def report(run: Run, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The loss by position with the memory and, if there is one, with it cleared."""
    readings, model = {}, run.model
    for label, clear in (("memory carried", False), ("cleared", True)):
        if not (clear and carries_nothing(model)):
            nats = token_nats(model, run.documents, run.lanes, clear_memory=clear)
            readings[label] = by_position(nats, run.documents, run.tokenizer, model.config.segment)
    if options.plot:
        draw_positions(options.plot, readings, model.attention_reach)
    record = {label.replace(" ", "_"): [row._asdict() for row in rows] for label, rows in readings.items()}
    reach = f"attention reaches {model.attention_reach:,} tokens back"
    return {"by_position": record, "attention_reach": model.attention_reach}, [*position_lines(readings), reach]


REPORT = Report(
    "the loss by the position in the document, with the memory and with it cleared",
    "RUN --plot positions.png",
    report,
    plots=True,
)
