"""What a page shows beside a table's numbers: its picture, and notes that one table alone has."""

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from accelerated.evaluation.figures import FIGURE_WIDTH, figure_class, new_figure, save_figure
from accelerated.lab.tables.orderings import (
    differences,
    in_words,
    mean_and_interval,
    mean_of,
    plus_minus,
    values_of,
    verdict,
)
from accelerated.lab.tables.table import Panel, Table

WIDTH = 118  # of a page's prose
SPACE = 1 / 18  # of the axes' height, between two names


def wrapped(text: str) -> str:
    """Paragraphs of prose, wrapped."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in paragraphs)


def pareto_rows(record: dict) -> list[str]:
    """The names of the rows that no other beats for as many FLOPs or fewer."""
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
    return names


def draw(table: Table, record: dict, path: Path) -> None:
    """Draw a table's lines, or if it has none its orderings."""
    if not table.picture:
        draw_orderings(table, record, path)
        return
    names = dict.fromkeys(name for panel in table.picture for name in panel.names)
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    figure, all_axes = new_figure(len(table.picture))
    for panel, axes in zip(table.picture, all_axes, strict=True):
        draw_panel(axes, panel, record, colours)
        side = next(iter(panel.sides.values())).replace("*", panel.names[0])
        is_row = side in {row["name"] for row in record["rows"]}  # or the title names what it is
        axes.set_title(panel.title, pad=12)
        axes.set_xlabel(panel.xlabel)
        axes.set_ylabel(table.measures[0].title if is_row else "")
    save_figure(figure, path)


COLOURS = {"holds": "#2f6fb0", "does not hold": "#c2571a", "cannot be told": "0.5"}


def draw_orderings(table: Table, record: dict, path: Path) -> None:
    """Draw the mean difference of each ordering with its interval, its words above it."""
    height = 0.5 * len(table.orderings) + 0.8
    figure = figure_class()(figsize=(FIGURE_WIDTH, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right", "left"]].set_visible(False)
    for line, ordering in enumerate(table.orderings):
        axes.plot([0, 0], [-line - 0.15, -line + 0.15], color="0.3", linewidth=1)
        by_seed = differences(record, ordering)
        mean, half = mean_and_interval(by_seed)
        colour = COLOURS[verdict(by_seed)]
        axes.errorbar(mean, -line, xerr=half, fmt="o", color=colour, capsize=3)
        words = f"{in_words(record, ordering)}: {plus_minus(mean, half)}, {len(by_seed)} seeds"
        place = axes.get_yaxis_transform()
        axes.text(0, 0.25 - line, words, transform=place, fontsize=8, color=colour)
    axes.set(ylim=(-len(table.orderings) + 0.5, 0.7), yticks=[])
    words = (
        f"{table.measures[0].title}: how far the first is ahead, 95% over seeds;\n"
        "blue: ahead, orange: behind, grey: cannot be told; the upright line: level"
    )
    axes.set_xlabel(words, fontsize=8, loc="left")
    save_figure(figure, path)


def draw_panel(axes: Any, panel: Panel, record: dict, colours: dict[str, str]) -> None:
    """Draw a panel's lines of means over seeds, each with its name at its end, and a guess."""
    numeric = next(iter(panel.sides))[0].isdigit()
    places: list[Any] = list(panel.sides)
    if numeric:
        places = [int(place.replace(",", "")) for place in places]
    ends = {}  # {name: (x, y) of its line's end}
    levels = {}  # {name: the sum of its means}
    for number, name in enumerate(panel.names):
        sides = [side.replace("*", name) for side in panel.sides.values()]
        if panel.across:
            places = [mean_of(values_of(record, f"{side} @ {panel.across}")) for side in sides]
        of_seeds = [values_of(record, side) for side in sides]
        means = [mean_of(values) for values in of_seeds]
        seeds = np.array(of_seeds, float)  # (places, seeds), NaN where a run is missing
        axes.plot(places, seeds, color=colours[name], linewidth=0.5, alpha=0.4)
        line = "--" if number % 2 else "-"
        marker = "osv^D<>PX"[number]
        axes.plot(places, means, linestyle=line, marker=marker, markersize=4, color=colours[name])
        ends[name] = (places[-1], means[-1])
        levels[name] = sum(means)
    if isinstance(places[0], int) and places[-1] > 10 * places[0]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, list(panel.sides), fontsize=7)
    label_ends(axes, {name: ends[name] for name in sorted(ends, key=levels.__getitem__)}, colours)
    for known, shares in record.get("chances", {}).items():
        heights = list(shares.values())
        if len(set(heights)) == 1:
            axes.axhline(heights[0], color="0.5", linewidth=1, linestyle=":")
        else:
            axes.plot(places, heights, color="0.5", linewidth=1, linestyle=":")
        style = {"color": "0.4", "fontsize": 7, "va": "bottom"}
        axes.text(0.01, heights[0], known, transform=axes.get_yaxis_transform(), **style)
    if panel.seen:
        seen = float(panel.seen)
        axes.axvspan(seen / 2, seen, color="0.93", zorder=0)
        axes.set_xlim(left=seen / 2)  # the axis is logarithmic
        place = axes.get_xaxis_transform()
        axes.text(seen / 2, 1.0, "seen in training", transform=place, fontsize=7)


def label_ends(axes: Any, ends: dict[str, tuple[float, float]], colours: dict[str, str]) -> None:
    """Write each line's name right of its end, with a thin line to it.

    Names that would overlap are moved up, of ends at about one height the later ones of `ends`.
    """
    to_fractions = axes.transData + axes.transAxes.inverted()
    left, _ = axes.get_xlim()  # any x; a line's own may be a word
    heights = {name: to_fractions.transform((left, y))[1] for name, (_, y) in ends.items()}
    height = -math.inf
    where = {"textcoords": "axes fraction", "va": "center", "fontsize": 8}
    for name in bottom_up(heights):
        height = max(heights[name], height + SPACE)
        leader = {"arrowstyle": "-", "relpos": (0, 0.5), "color": colours[name], "linewidth": 0.5}
        place = (1.08, height)
        axes.annotate(name, ends[name], place, color=colours[name], arrowprops=leader, **where)
    axes.margins(x=0.05)


def bottom_up(heights: dict[str, float]) -> list[str]:
    """Names by height; those that would overlap the one before stay in the given order."""
    order = list(heights)
    groups: list[list[str]] = []
    last = -math.inf
    for name in sorted(heights, key=heights.__getitem__):
        if heights[name] >= last + SPACE:
            groups.append([])
        groups[-1].append(name)
        last = heights[name]
    return [name for group in groups for name in sorted(group, key=order.index)]
