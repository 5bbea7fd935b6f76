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
    return "\n\n".join(
        textwrap.fill(" ".join(part.split()), WIDTH, break_on_hyphens=False)
        for part in text.split("\n\n")
    )


def mean_of(values: list[float | None]) -> float:
    """The mean of the seeds that did not diverge, NaN if all did."""
    finite = [value for value in values if value is not None]
    return statistics.mean(finite) if finite else math.nan


def values_of(record: dict, side: str) -> list:
    """What a side of an ordering was for each seed of a record; None if a run diverged."""
    rows = {row["name"]: row["measured"] for row in record["rows"]}
    names, _, title = side.partition(" @ ")
    if names.split(" - ")[0] not in rows:
        names, title = next(iter(rows)), side
    columns = [rows[name][title or next(iter(rows[name]))] for name in names.split(" - ")]
    if len(columns) == 1:
        return columns[0]
    return [None if None in pair else pair[0] - pair[1] for pair in zip(*columns, strict=False)]


def pareto(record: dict) -> str:
    """Which rows nothing beats for as many FLOPs or fewer."""
    best, names = math.inf, []
    points = [
        [mean_of(row["measured"][title]) for title in ("FLOPs per token", "test, bits per byte")]
        for row in record["rows"]
    ]
    for (_, bits), row in sorted(
        zip(points, record["rows"], strict=True), key=lambda pair: pair[0]
    ):
        if bits < best:
            best = bits
            names.append(row["name"])
    return wrapped(f"On the Pareto line of Figure 5, cheap ones first: {'; '.join(names)}.")


def sign_test(nearer: int, farther: int) -> float:
    """The two-sided probability that a fair coin is as uneven."""
    count, fewer = nearer + farther, min(nearer, farther)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count)


def topics(record: dict) -> str:
    """For each seed in how many contexts the recurrent model's divergence is lower; those that are as near do not count."""
    rows, pairs = (
        [],
        zip(
            *(values_of(record, f"{name} @ divergences") for name in ("GPT-2", "recurrent")),
            strict=True,
        ),
    )
    for seed, pair in enumerate(pairs):
        if None not in pair:  # neither run diverged
            nearer, farther = (
                sum(sign * (a - b) > 0 for a, b in zip(*pair, strict=True)) for sign in (1, -1)
            )
            share = nearer / max(1, nearer + farther)
            rows.append(
                [seed, nearer, farther, f"{share:.1%}", f"{sign_test(nearer, farther):.2g}"]
            )
    return markdown_table(
        ["seed", "recurrent nearer", "plain nearer", "share", "sign test, p"], *rows
    )


def facts_known(record: dict) -> str:
    """How many facts each method knows at most, with the usual state and the large one, if it guesses the others."""
    most = {}  # {method: {state: facts}}
    for row in record["rows"]:
        method, _, asked = row["name"].partition(": ")
        number, _, state = asked.partition(" facts")
        known = int(number) * max(0.0, 2 * mean_of(row["measured"]["right"]) - 1)
        most.setdefault(method, {})[state] = max(known, most.get(method, {}).get(state, 0.0))
    states = {"": "the usual state", ", large": "four times as large"}
    lines = (
        [name, *(f"{known[state]:.0f}" if state in known else "" for state in states)]
        for name, known in most.items()
    )
    text = "Who is right in a part a of the answers about n facts, and guesses what it does not know, knows n (2 a - 1)."
    return f"{text}\n\n{markdown_table(['facts known at most', *states.values()], *lines)}"


NOTES = {"pareto": pareto, "topics": topics, "facts known": facts_known}


def draw(table: Table, record: dict, path: Path) -> None:
    """Draw a table's picture."""
    figure, all_axes = new_figure(len(table.picture))
    for panel, axes in zip(table.picture, all_axes, strict=True):
        draw_panel(axes, panel, record)
        named = any(
            " @ " in side for side in panel.sides.values()
        )  # the measure, which then stands in the title
        axes.set(
            title=panel.title, xlabel=panel.xlabel, ylabel="" if named else table.measures[0].title
        )
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_panel(axes: Any, panel: Panel, record: dict) -> None:
    """Draw a panel's lines of means over seeds, and what a guess reaches."""
    places = [int(place.replace(",", "")) if place[0].isdigit() else place for place in panel.sides]
    for number, name in enumerate(panel.names):
        sides = [side.replace("*", name) for side in panel.sides.values()]
        if panel.across:
            places = [mean_of(values_of(record, f"{side} @ {panel.across}")) for side in sides]
        style = {
            "marker": "osv^D<>P"[number],
            "linestyle": "--" if number % 2 else "-",
            "markersize": 4,
        }
        axes.plot(places, [mean_of(values_of(record, side)) for side in sides], label=name, **style)
    if isinstance(places[0], int) and len(places) < 9:  # few, each twice the one before
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, list(panel.sides), fontsize=7)
    if panel.guess:
        axes.axhline(float(panel.guess), color="0.5", linewidth=1, linestyle=":")
