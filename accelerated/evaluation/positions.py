"""The loss by position in the document."""

import math
from typing import NamedTuple

import numpy as np

from accelerated.evaluation.score import as_cell, ratio
from accelerated.training.log import new_figure, save_figure


class PositionRow(NamedTuple):
    """Predictions of the tokens at positions start .. stop - 1 of their documents, the first token being position 0."""

    start: int
    stop: int
    documents: int  # that have a token to predict there
    nats: float  # summed -log p of the scored tokens
    tokens: int  # scored tokens
    text_bytes: int  # bytes of text that the scored tokens spell

    RATES = ("bits_per_token", "bits_per_byte")

    @property
    def bits_per_token(self):
        return ratio(self.nats / math.log(2), self.tokens)

    @property
    def bits_per_byte(self):
        return ratio(self.nats / math.log(2), self.text_bytes)


def doubling_ranges(first, length):
    """(start, stop) of [0, first), [first, 2 first), [2 first, 4 first) ... that together are [0, length)."""
    start, stop = 0, first
    while start < length:
        yield start, min(stop, length)
        start, stop = stop, 2 * stop


def by_position(nats, documents, tokenizer, first):
    """The loss by how far into its document the predicted token stands: a PositionRow for each of doubling_ranges(first, ...).

    nats are token_nats of the documents. Does the loss keep falling past what attention reaches? Later ranges hold longer
    documents alone, and those may be easier: compare with a second reading of the same documents, the memory cleared.
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
    return [
        PositionRow(start, stop, reached, total, tokens, text_bytes)
        for (start, stop), total, (reached, tokens, text_bytes) in zip(ranges, sums, counts.tolist(), strict=True)
    ]


def position_lines(readings):
    """Lines of a table of readings {label: rows of by_position}, which are all of the same documents: bits per byte."""
    widths = [max(len(label), 9) for label in readings]
    labels = "".join(f"   {label:>{width}}" for label, width in zip(readings, widths, strict=True))
    lines = ["bits per byte by the position of the predicted token in its document", f"{'position':>21} {'documents':>10}"]
    lines[1] += f" {'tokens':>13}{labels}"
    for rows in zip(*readings.values(), strict=True):
        place = f"{rows[0].start:,} to {rows[0].stop - 1:,}"
        cells = "".join(f"   {as_cell(row.bits_per_byte, '.4f'):>{width}}" for row, width in zip(rows, widths, strict=True))
        lines.append(f"{place:>21} {rows[0].documents:10,d} {rows[0].tokens:13,d}{cells}")
    return lines


def draw_positions(path, readings, reach=None):
    """Draw readings {label: rows of by_position}, a line each; reach is how many tokens back attention looks, if it ends."""
    figure, axes = new_figure()
    for label, rows in readings.items():
        shown = [row for row in rows if row.text_bytes]
        middles = [(row.start + row.stop) / 2 for row in shown]
        axes.plot(middles, [row.bits_per_byte for row in shown], marker="o", markersize=4, label=label)
    if reach is not None:
        axes.axvline(reach, color="0.4", linestyle="--", linewidth=1, label=f"reach of attention, {reach:,} tokens")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.set(title="Loss by position in the document", xlabel="position of the predicted token (tokens, middle of its range)")
    axes.set_ylabel("loss (bits per byte)")
    axes.legend(frameon=False)
    save_figure(figure, path)
