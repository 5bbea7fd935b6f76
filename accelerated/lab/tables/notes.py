"""What a page shows beside a table's numbers: its picture, and notes that one table alone has."""

import math
import statistics
import textwrap
from pathlib import Path
from typing import Any

from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.lab.speed.timing import markdown_table
from accelerated.lab.tables.table import Panel, Table

WIDTH = 118  # of a page's prose


def wrapped(text: str) -> str:
    """Paragraphs of prose, wrapped."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in paragraphs)


def mean_of(values: list[float | None]) -> float:
    """The mean of the seeds that did not diverge, NaN if all did."""
    finite = [value for value in values if value is not None]
    return statistics.mean(finite) if finite else math.nan


def values_of(record: dict, side: str) -> list:
    """What a side of an ordering was for each seed of a record; None if a run diverged."""
    rows = {row["name"]: row["measured"] for row in record["rows"]}
    first_row = next(iter(rows))
    first_measure = next(iter(rows[first_row]))
    names, _, title = side.partition(" @ ")
    better, _, subtracted = names.partition(" - ")
    if better not in rows:  # a measure alone
        return rows[first_row][side]
    values = rows[better][title or first_measure]
    if not subtracted:
        return values
    others = rows[subtracted][title or first_measure]
    pairs = zip(values, others, strict=False)
    return [None if None in pair else pair[0] - pair[1] for pair in pairs]


def pareto(record: dict) -> str:
    """Which rows nothing beats for as many FLOPs or fewer."""
    points = []
    for row in record["rows"]:
        flops = mean_of(row["measured"]["FLOPs per token"])
        points.append((flops, mean_of(row["measured"]["test, bits per byte"]), row["name"]))
    best = math.inf
    names = []
    for _, bits, name in sorted(points, key=lambda point: point[:2]):
        if bits < best:
            best = bits
            names.append(name)
    return wrapped(f"On the Pareto line of Figure 5, cheap ones first: {'; '.join(names)}.")


def sign_test(nearer: int, farther: int) -> float:
    """The two-sided probability that a fair coin is as uneven."""
    count, fewer = nearer + farther, min(nearer, farther)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count)


def topics(record: dict) -> str:
    """For each seed in how many contexts the recurrent model's divergence is lower.

    Those that are as near do not count.
    """
    plain = values_of(record, "GPT-2 @ divergences")
    recurrent = values_of(record, "recurrent @ divergences")
    rows = []
    for seed, pair in enumerate(zip(plain, recurrent, strict=True)):
        if None in pair:  # a run diverged
            continue
        gains = [a - b for a, b in zip(*pair, strict=True)]
        nearer = sum(gain > 0 for gain in gains)
        farther = sum(gain < 0 for gain in gains)
        share = nearer / max(1, nearer + farther)
        rows.append([seed, nearer, farther, f"{share:.1%}", f"{sign_test(nearer, farther):.2g}"])
    head = ["seed", "recurrent nearer", "plain nearer", "share", "sign test, p"]
    return markdown_table(head, *rows)


def facts_known(record: dict) -> str:
    """How many facts each method knows at most, if it guesses the others.

    With the usual state and the large one.
    """
    most = {}  # {method: {state: facts}}
    for row in record["rows"]:
        method, _, asked = row["name"].partition(": ")
        number, _, state = asked.partition(" facts")
        known = int(number) * max(0.0, 2 * mean_of(row["measured"]["right"]) - 1)
        own = most.setdefault(method, {})
        own[state] = max(known, own.get(state, 0.0))
    states = {"": "the usual state", ", large": "four times as large"}
    lines = []
    for method, own in most.items():
        cells = [f"{own[state]:.0f}" if state in own else "" for state in states]
        lines.append([method, *cells])
    text = (
        "Who is right in a part a of the answers about n facts, and guesses what it does not know, "
        "knows n (2 a - 1)."
    )
    return f"{text}\n\n{markdown_table(['facts known at most', *states.values()], *lines)}"


NOTES = {"pareto": pareto, "topics": topics, "facts known": facts_known}


def draw(table: Table, record: dict, path: Path) -> None:
    """Draw a table's picture."""
    figure, all_axes = new_figure(len(table.picture))
    for panel, axes in zip(table.picture, all_axes, strict=True):
        draw_panel(axes, panel, record)
        title_names_measure = any(" @ " in side for side in panel.sides.values())
        axes.set(title=panel.title, xlabel=panel.xlabel)
        axes.set_ylabel("" if title_names_measure else table.measures[0].title)
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_panel(axes: Any, panel: Panel, record: dict) -> None:
    """Draw a panel's lines of means over seeds, and what a guess reaches."""
    numeric = next(iter(panel.sides))[0].isdigit()
    places = list(panel.sides)
    if numeric:
        places = [int(place.replace(",", "")) for place in places]
    for number, name in enumerate(panel.names):
        sides = [side.replace("*", name) for side in panel.sides.values()]
        if panel.across:
            places = [mean_of(values_of(record, f"{side} @ {panel.across}")) for side in sides]
        means = [mean_of(values_of(record, side)) for side in sides]
        line = "--" if number % 2 else "-"
        marker = "osv^D<>P"[number]
        axes.plot(places, means, linestyle=line, marker=marker, markersize=4, label=name)
    if isinstance(places[0], int) and len(places) < 9:  # few, each twice the one before
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, list(panel.sides), fontsize=7)
    if panel.guess:
        axes.axhline(float(panel.guess), color="0.5", linewidth=1, linestyle=":")
