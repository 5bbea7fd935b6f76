"""A table's picture: its lines, or if it has none its orderings."""

import statistics
from pathlib import Path
from typing import Any

from accelerated.evaluation.figures import FIGURE_WIDTH, figure_class, new_figure, save_figure
from accelerated.lab.harness import mean_and_interval, plus_minus
from accelerated.lab.pages import label_ends
from accelerated.lab.tables.orderings import differences, in_words, verdict
from accelerated.lab.tables.table import Panel, Table

COLOURS = {"holds": "#2f6fb0", "does not hold": "#c2571a", "cannot be told": "0.5"}


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
        axes.set_title(panel.title, pad=12)
        axes.set_xlabel(panel.xlabel)
        axes.set_ylabel(table.measures[0].title)
    save_figure(figure, path)


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
    """Draw a panel's lines of means over seeds, each with its name at its end."""
    ends = {}  # {name: (x, y) of its line's end}
    for number, name in enumerate(panel.names):
        places, of_seeds = points_of(record, panel, name)
        means = [statistics.mean(values) for values in of_seeds]
        axes.plot(places, of_seeds, color=colours[name], linewidth=0.5, alpha=0.4)
        style = ("-", "--")[number % 2] + "osv^D<>PX"[number]
        axes.plot(places, means, style, markersize=4, color=colours[name])
        ends[name] = (places[-1], means[-1])
    label_ends(axes, ends, colours)


def points_of(record: dict, panel: Panel, name: str) -> tuple[list, list[list]]:
    """The places of a line's points, and their values by seed."""
    places = []
    of_seeds = []
    for row in record["rows"]:
        line, _, x = row["name"].partition(": ")
        if line == name:
            measured = row["measured"]
            of_seeds.append(next(iter(measured.values())))
            places.append(statistics.mean(measured[panel.across]) if panel.across else x)
    return places, of_seeds
