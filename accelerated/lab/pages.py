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


def mean_and_spread(values: list[float], form: str) -> str:
    """'mean (least..most)' of the seeds, or their only value."""
    mean, least, most = (f"{f(values):{form}}" for f in (statistics.mean, min, max))
    if least == most:
        return mean
    return f"{mean} ({least}..{most})"


def laid_out(name: str, title: str, answer: str, parts: Sequence[str]) -> str:
    """A page in Markdown: its picture, which stands beside it under its name, the answer, the rest.

    Empty blocks are left out.
    """
    blocks = [f"# {title}", f"![{title}]({name}.svg)", wrapped(f"**{answer}**"), *parts]
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
    """Write each line's name right of its end (x, y), with a thin line to it.

    Names that would overlap are moved up.
    """
    to_fractions = axes.transData + axes.transAxes.inverted()
    left, _ = axes.get_xlim()  # any x; a line's own may be a word
    height = -math.inf
    where = {"textcoords": "axes fraction", "va": "center", "fontsize": 8}
    for name, end in sorted(ends.items(), key=lambda item: item[1][1]):
        height = max(height + SPACE, to_fractions.transform((left, end[1]))[1])
        leader = {"arrowstyle": "-", "relpos": (0, 0.5), "color": colours[name], "linewidth": 0.5}
        axes.annotate(name, end, (1.08, height), color=colours[name], arrowprops=leader, **where)
    axes.margins(x=0.05)
