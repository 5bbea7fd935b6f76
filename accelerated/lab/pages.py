"""What every experiment's page is made of: its order, tables in Markdown, names beside lines."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from accelerated.lab.harness import PARTS, RESULTS

WIDTH = 118  # of a page's prose
SPACE = 1 / 18  # of the axes' height, between two names


def wrapped(text: str) -> str:
    """Paragraphs of prose, wrapped."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in paragraphs)


def markdown_table(*rows: Sequence) -> str:
    """A table in Markdown; the first row is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def mean_and_spread(values: list[float | None], form: str) -> str:
    """'mean (least..most)' of the seeds, or their only value; or how many diverged."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return f"{len(values) - len(finite)} of {len(values)} diverged"
    least = min(finite)
    most = max(finite)
    mean = f"{statistics.mean(finite):{form}}"
    if least == most:
        return mean
    return f"{mean} ({f'{least:{form}}'.rstrip('%')}..{f'{most:{form}}'.rstrip('%')})"


def laid_out(name: str, title: str, answer: str, parts: Sequence[str]) -> str:
    """A page in Markdown: its picture, which stands beside it under its name, the answer, the rest.

    Empty blocks are left out.
    """
    bold = wrapped(f"**{answer}**") if answer else ""
    blocks = [f"# {title}", f"![{title}]({name}.svg)", bold, *parts]
    return "\n\n".join(filter(None, blocks)) + "\n"


def commands(program: str, name: str, takes: str, row: str) -> str:
    """How a page is made anew, and how one of its rows alone."""
    whole = f"python -m accelerated.lab.{program}"
    about = f"""**To make it again.** The first command takes {takes}, goes on where it was
    interrupted, and writes {name}.json, its picture and this page into `{RESULTS}`. The second one
    makes one row with one seed. It writes into `{PARTS}`, over no page."""
    return f"""{wrapped(about)}

```bash
{whole}
{whole} --rows "{row}" --seeds 0
```"""


def label_ends(axes: Any, ends: dict[str, tuple[Any, float]], colours: dict[str, str]) -> None:
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
