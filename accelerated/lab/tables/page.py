"""The page of a measured table: its numbers, the orderings judged seed by seed, what it cost, and every row's options.

Runs of one seed read the same text in the same order, so an ordering is compared seed by seed.
"""

import itertools
import math
import shlex
import statistics
import textwrap

from accelerated.evaluation.overlap import mean_and_range
from accelerated.lab.markdown import markdown_table
from accelerated.lab.speed.timing import paired_ratios, spread
from accelerated.lab.tables.table import LAST_VALIDATION, Ordering, Table
from accelerated.lab.trials import SEEDS, settled
from accelerated.models import NAMES

WIDTH = 118  # of a page's prose


def wrapped(text: str) -> str:
    """Paragraphs of prose, wrapped."""
    return "\n\n".join(textwrap.fill(" ".join(part.split()), WIDTH, break_on_hyphens=False) for part in text.split("\n\n"))


def mean_of(values: list[float | None]) -> float:
    """The mean of the seeds that did not diverge, NaN if all did."""
    found = [value for value in values if value is not None]
    return statistics.mean(found) if found else math.nan


def mean_and_spread(values: list[float | None], form: str) -> str:
    """'mean (least .. most)' of the seeds, or their only value; or how many diverged."""
    if diverged := values.count(None):
        return f"{diverged} of {len(values)} diverged"
    return f"{values[0]:{form}}" if min(values) == max(values) else mean_and_range(values, form)


def page(table: Table, record: dict) -> str:
    """The page of a record, in Markdown."""
    command = f"python -m accelerated.lab.tables {record['name']}" + (
        "" if record["scale"] == "small" else f" --scale {record['scale']}"
    )
    measured = (
        f"Measured on {record['date']}, {record['machine']}, torch {record['torch']}, {record['jobs']} runs at a time. "
        f"Mean (least .. most) of seeds {', '.join(map(str, SEEDS))}. {onward(record['name'])}"
    )
    parts = [f"# {table.title}", wrapped(table.about), f"```bash\n{command}\n```", wrapped(measured)]
    parts += [picture(table, record)] if table.draw else []
    parts += [(table.results or results)(table, record), verdicts(table, record), cost(record), settings_part(record)]
    return "\n\n".join(filter(None, parts)) + "\n"


def model_of(name: str) -> str:
    """The model after whose paper a table is named, or nothing."""
    model = name.partition("-")[0]
    return model if model in NAMES else ""


def onward(name: str) -> str:
    """The sentence that links a page to the method's other pages."""
    if model := model_of(name):
        return f"The method is in its [chapter](../{model}.md), what else was measured in [its results]({model}.md)."
    if name.startswith("recall-"):
        return "What it says of the methods is in [what a memory can hold](recall.md)."
    return "The methods are [side by side](../index.md)."


def stem(name: str, scale: str) -> str:
    """What the files of a table's page are called; the scale is in it unless it is small."""
    return name if scale == "small" else f"{name}-{scale}"


def picture(table: Table, record: dict) -> str:
    """The line that shows the page's picture."""
    return f"![{table.title}]({stem(table.picture or record['name'], record['scale'])}.svg)"


def results(table: Table, record: dict) -> str:
    """The measured numbers: a row each, or if there are many measures a column each."""
    forms = {m.title: m.form for m in table.measures}
    cells = {
        row["name"]: {title: mean_and_spread(values, forms[title]) for title, values in row["measured"].items()}
        for row in record["rows"]
    }
    if len(cells) <= 3 < len(forms):
        return markdown_table(["", *cells], *([title, *(own.get(title, "") for own in cells.values())] for title in forms))
    paper = {row["name"]: row["paper"] for row in record["rows"]}
    head = ["", *forms, *(["the paper"] if any(paper.values()) else [])]
    rows = ([name, *(own.get(title, "") for title in forms), *([paper[name]] if len(head) > len(forms) + 1 else [])]
            for name, own in cells.items())  # fmt: skip
    return markdown_table(head, *rows)


def verdicts(table: Table, record: dict) -> str:
    """Each ordering, of the paper or expected, the differences seed by seed, and whether it holds."""
    if not table.orderings:
        return ""
    whose = "the paper's" if model_of(record["name"]) else "expected"
    first, rows = table.measures[0], [[f"{whose} ordering", "difference by seed", "here"]]
    forms = {m.title: m.form for m in table.measures}
    for ordering in table.orderings:
        found = differences(record, ordering, first.title)
        form = forms.get(ordering.better.partition(" | ")[2], first.form)
        signed = ", ".join(f"{value:+{form}}" for value in found)
        rows.append([ordering.claim, signed, verdict(found)])
    text = """Differences are worse minus better, so a positive one agrees with the ordering. It holds if all seeds agree, and
    within the spread if most of them and the mean do; in brackets, how many agree."""
    if any(row[-1].startswith("does not hold") for row in rows[1:]):
        text += " What was tried for those that do not hold is in the [log](log.md)."
    return f"## {whose.capitalize()} orderings\n\n{wrapped(text)}\n\n{markdown_table(*rows)}"


def differences(record: dict, ordering: Ordering, first: str) -> list[float]:
    """worse - better of an ordering for each seed; `first` is the measure if it names none."""

    def values(side: str) -> list[float]:
        if " - " in side:
            return [a - b for a, b in zip(*map(values, side.split(" - ")), strict=True)]
        row, _, title = side.partition(" | ")
        measured = next(found for found in record["rows"] if found["name"] == row)["measured"][title or first]
        return [math.inf if value is None else value for value in measured]

    return [worse - better for better, worse in zip(values(ordering.better), values(ordering.worse), strict=True)]


def verdict(differences: list[float]) -> str:
    """Whether worse - better, seed by seed, agrees with an ordering."""
    agree, seeds = sum(value > 0 for value in differences), len(differences)
    if agree in (0, seeds):
        return "holds" if agree else "does not hold"
    holds = 2 * agree > seeds and statistics.mean(differences) > 0
    return f"{'within the spread' if holds else 'does not hold'} ({agree} of {seeds})"


def cost(record: dict) -> str:
    """Parameters, speed and the tuned choice of each row."""
    names, rows, choices = *names_and_rows(record), record["grid"]
    title, text = "## Cost", "No row was tuned: the learning rates are in the settings below."
    if was_tuned := len(choices) > 1:
        title = "## Cost and tuning"
        text = f"Every row was tuned on seed 0 by {tuned_by(record)}, each over {', '.join(f'`{c}`' for c in choices)}."
    columns = {"": names, "parameters": [f"{row['parameters']:,}" for row in rows]}
    if "step_seconds" in rows[0]:
        text += """ Speeds are medians of forward and backward passes of a training step that took turns; times are over the first
        row's, median (least..most)."""
        columns["tokens/s in training"], columns["time for a token"] = zip(*(speed(row, rows[0]) for row in rows), strict=True)
    if was_tuned:
        columns["tuned"] = [f"`{row['choice']}`" for row in rows]
    cells = markdown_table([*columns], *zip(*columns.values(), strict=True))
    return "\n\n".join(filter(None, [title, wrapped(text), cells, at_an_end(record)]))


def tuned_by(record: dict) -> str:
    """What chose among a grid, in words; an older record does not say it."""
    return record.get("tuned_by", LAST_VALIDATION[0])


def shared_name(first: str, last: str) -> str:
    """The name of the rows from one to another: 'a 1', 'a 3' -> 'a 1 .. 3'."""
    words, others = first.split(), last.split()
    alike = next((at for at, pair in enumerate(zip(words, others, strict=False)) if len({*pair}) == 2), len(words))
    return first if first == last else f"{first} .. {' '.join(others[alike:])}"


def names_and_rows(record: dict) -> tuple[list[str], list[dict]]:
    """The names and rows of a record, with one row for those after one another that are the same model: 'a 1 .. 3'."""
    names, rows = [], []
    for _, same in itertools.groupby(record["rows"], key=lambda row: row["options"]):
        group = list(same)
        names.append(shared_name(group[0]["name"], group[-1]["name"]))
        rows.append(group[0])
    return names, rows


def at_an_end(record: dict) -> str:
    """Which rows did best at an end of a grid of rates, and by how much: beyond it they might be better still."""
    grid, found = record["grid"], []
    if len(grid) < 3 or any(len(settled(choice)) > 1 for choice in grid):
        return ""
    for name, row in zip(*names_and_rows(record), strict=True):
        if row["choice"] in (grid[0], grid[-1]):
            beside = row["tuning"][grid[1] if row["choice"] == grid[0] else grid[-2]]
            more = "" if beside is None else f" ({beside - row['tuning'][row['choice']]:.3f})"
            found.append(name + more)
    whose = " of validation text" if tuned_by(record) == LAST_VALIDATION[0] else ""
    text = f"Best at an end of the grid, with how much better than the next choice in bits per byte{whose}: "
    return wrapped(f"{text}{', '.join(found)}.") if found else ""


def speed(row: dict, first: dict) -> list[str]:
    """A row's new tokens per second, and its time for one over the first row's, pair by pair."""
    ratios = paired_ratios(row["step_seconds"], first["step_seconds"])
    return [f"{1000 / statistics.median(row['step_seconds']):,.0f}", spread(ratios, ".2f")]


def settings_part(record: dict) -> str:
    """The options, to make every row again."""
    lines = [f"all      {record['options']}"] + ([f"FIRST    {record['first']}"] if record["first"] else [])
    lines += [f"{name:<24} {last_of_each(row['options'])}" for name, row in zip(*names_and_rows(record), strict=True)]
    wrapped_lines = (textwrap.wrap(line, WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False) for line in lines)
    text = "Options of `train.py`: those of all rows, then each row's own"
    text += "; FIRST is the run that all begin from." if record["first"] else "."
    return "## Settings\n\n" + text + "\n\n```text\n" + "\n".join(line for group in wrapped_lines for line in group) + "\n```"


def last_of_each(options: str) -> str:
    """Options without those that a later one of the same name replaces."""
    return shlex.join(word for name, values in settled(options).items() for word in (name, *values))
