"""eval.py positions: the loss by a token's position in its document."""

import argparse
import math
from collections.abc import Iterator, Sequence

import numpy as np

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, lengths_of
from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.evaluation.score import (
    Answer,
    Score,
    TrainedRun,
    as_cell,
    is_stateless,
    token_nats,
)


def doubling_ranges(first: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of [0, first), [first, 2 first), [2 first, 4 first) ...

    Together they cover [0, length).
    """
    start = 0
    stop = first
    while start < length:
        yield start, min(stop, length)
        start = stop
        stop = 2 * stop


def by_position(
    nats: list[np.ndarray], documents: Sequence[Document], tokenizer: Tokenizer, first: int
) -> list[dict]:
    """The loss by the predicted token's position in its document, from token_nats.

    There is a row for each of doubling_ranges. `documents` of a row is how many reach its range;
    the rest is as in Score. A document's first token is at position 0.
    """
    longest = int(lengths_of(documents).max(initial=0))
    if longest == 0:
        return []
    rows = []
    for start, stop in doubling_ranges(first, longest + 1):
        # The target at i is the document's token i + 1
        span = slice(max(start - 1, 0), stop - 1)
        score, reached = score_of_span(span, nats, documents, tokenizer)
        rows.append(
            {
                "start": start,
                "stop": stop,
                "documents": reached,
                "nats": score.nats,
                "tokens": score.tokens,
                "text_bytes": score.text_bytes,
                "bits_per_token": score.bits_per_token,
                "bits_per_byte": score.bits_per_byte,
            }
        )
    return rows


def score_of_span(
    span: slice, nats: list[np.ndarray], documents: Sequence[Document], tokenizer: Tokenizer
) -> tuple[Score, int]:
    """(The Score of a span of targets of all documents; how many documents reach it)."""
    total = 0.0
    tokens = 0
    text_bytes = 0
    reached = 0
    for losses, document in zip(nats, documents, strict=True):
        scored = document.scored[span]
        targets = document.targets[span][scored]
        total += float(losses[span][scored].sum())
        tokens += len(targets)
        text_bytes += int(tokenizer.token_bytes[targets].sum())
        reached += len(scored) > 0
    return Score(total, tokens, text_bytes=text_bytes), reached


def position_lines(readings: dict[str, list[dict]]) -> list[str]:
    """The table of bits per byte of readings {label: rows of by_position} of the same documents."""
    columns = [f"   {label:>9}" for label in readings]
    lines = [
        "bits per byte by the position of the predicted token in its document",
        f"{'position':>21} {'documents':>10}  {'tokens':>13}{''.join(columns)}",
    ]
    is_alone = False
    for rows in zip(*readings.values(), strict=True):
        first = rows[0]
        place = f"{first['start']:,} to {first['stop'] - 1:,}"
        is_alone = first["documents"] == 1
        mark = "*" if is_alone else " "
        line = f"{place:>21} {first['documents']:10,d}{mark} {first['tokens']:13,d}"
        for row, column in zip(rows, columns, strict=True):
            line += f"{as_cell(row['bits_per_byte'], '.4f'):>{len(column)}}"
        lines.append(line)
    if is_alone:  # the last row has the fewest
        lines.append("* of one document alone: of others it may differ")
    return lines


def saved_lines(carried: list[dict], cleared: list[dict]) -> list[str]:
    """The table of both readings and their difference, and what the memory saves in all.

    The first segment has no memory yet, and does not count.
    """
    saved = []
    for row, without in zip(carried, cleared, strict=True):
        difference = without["bits_per_byte"] - row["bits_per_byte"]
        saved.append({"bits_per_byte": difference})
    lines = position_lines({"memory carried": carried, "cleared": cleared, "saved": saved})
    text_bytes = sum(row["text_bytes"] for row in carried[1:])
    if not text_bytes:
        return lines
    nats = sum(row["nats"] for row in carried[1:])
    nats_without = sum(row["nats"] for row in cleared[1:])
    bits = (nats_without - nats) / math.log(2) / text_bytes
    verb = "saves" if bits > 0 else "costs"
    share = abs(1 - nats / nats_without)
    what = f"the memory {verb} {abs(bits):.4f} bits per byte, {share:.1%}"
    return [*lines, f"after the first {carried[0]['stop']:,} tokens of a document {what}"]


def draw_positions(path: str, readings: dict[str, list[dict]], reach: int) -> None:
    """Draw readings {label: rows of by_position}, a line each.

    reach is how many tokens back attention looks.
    """
    figure, [axes] = new_figure()
    for label, rows in readings.items():
        shown = [row for row in rows if row["text_bytes"]]
        middles = [(row["start"] + row["stop"]) / 2 for row in shown]
        bits = [row["bits_per_byte"] for row in shown]
        axes.plot(middles, bits, marker="o", markersize=4, label=label)
    how_far = f"reach of attention, {reach:,} tokens"
    axes.axvline(reach, color="0.4", linestyle="--", linewidth=1, label=how_far)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.set_title("Loss by position in the document")
    axes.set_xlabel("position of the predicted token (tokens, middle of its range)")
    axes.set_ylabel("loss (bits per byte)")
    axes.legend(frameon=False)
    save_figure(figure, path)


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """The loss by position with the memory carried and, if there is one, with it cleared."""
    model = run.model
    documents = run.splits[run.split]
    ways = {"memory carried": False}
    if not is_stateless(model):
        ways["cleared"] = True
    readings = {}
    for label, clear in ways.items():
        of_parts = token_nats(model, run.documents, run.lane_count, clear_memory=clear)
        nats = run.by_document(of_parts)
        readings[label] = by_position(nats, documents, run.tokenizer, model.config.segment)

    reach = model.attention_reach
    if options.plot:
        draw_positions(options.plot, readings, reach)
    by_way = {label.replace(" ", "_"): rows for label, rows in readings.items()}
    rows = [*readings.values()]
    lines = saved_lines(*rows) if len(rows) > 1 else position_lines(readings)
    lines.append(f"attention reaches {reach:,} tokens back")
    return {"by_position": by_way, "attention_reach": reach}, lines
