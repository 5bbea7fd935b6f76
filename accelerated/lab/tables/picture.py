"""A table's picture: its orderings."""

from pathlib import Path

from accelerated.evaluation.figures import empty_figure, save_figure
from accelerated.lab.harness import mean_and_interval, plus_minus
from accelerated.lab.tables.orderings import differences, in_words, verdict
from accelerated.lab.tables.table import Table

COLOURS = {"holds": "#2f6fb0", "does not hold": "#c2571a", "cannot be told": "0.5"}


def draw(table: Table, record: dict, path: Path) -> None:
    """Draw the mean difference of each ordering with its interval, its words above it."""
    figure = empty_figure(0.5 * len(table.orderings) + 0.8)
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
