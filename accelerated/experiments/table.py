"""A table of a paper: its rows as options of train.py, what is measured of them, and its page in docs/results.

A row is tuned on seed 0 (every row by the same grid), then trained with seeds 0, 1 and 2. An ordering of the paper is compared
seed by seed: runs of one seed read the same text in the same order.
"""

import datetime
import itertools
import json
import math
import os
import platform
import shlex
import statistics
import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from accelerated.bench.horizons import rollout_variant
from accelerated.bench.timing import paired_ratios, spread, time_in_turn
from accelerated.evaluation.overlap import mean_and_range
from accelerated.experiments.trials import LOG, SEEDS, Trial, Workshop, join, settled, tuned
from accelerated.models import MODELS
from accelerated.program.files import written_whole
from accelerated.training.options import parse
from accelerated.training.process import choose_device
from accelerated.training.settings import Settings

# What rows read and how long they train. Bytes and small windows: docs/results/text.md shows what context is worth there
SMALL = "--data stdlib --width 64 --heads 4 --feed-forward 256 --steps 400 --warmup 40"
GPU = "--data stdlib --dtype bfloat16 --width 512 --heads 8 --feed-forward 2048 --steps 500 --warmup 50"
RATES = ("--learning-rate 0.006", "--learning-rate 0.018", "--learning-rate 0.054")  # far apart: the best ones differ that much
NO_SIZES = MappingProxyType({})
WIDTH = 118  # of a page's prose
ROUNDS = 15  # in which the rows' training steps take turns


class Row(NamedTuple):
    """A row: options of train.py beside the table's; {names} stand for the scale's sizes and the row's own."""

    name: str
    options: str = ""
    paper: str = ""  # what the paper reports for it
    sizes: Mapping[str, str] = NO_SIZES


class Measure(NamedTuple):
    """A number of a trained run: taken from the JSON of a report of eval.py, or of all records of its log."""

    title: str
    pick: Callable[[dict], float]
    report: str = LOG  # words of eval.py; {names} as in a row's options
    form: str = ".3f"


class Ordering(NamedTuple):
    """What the paper says: `better` is below `worse`. Each side is a row, "row | measure", or the difference "row - row"."""

    claim: str
    better: str
    worse: str


class Scale(NamedTuple):
    """The sizes of a table on two cores or on a GPU."""

    options: str  # of every row
    sizes: Mapping[str, Any] = NO_SIZES
    grid: tuple[str, ...] = ()  # the choices of options among which every row is tuned, on seed 0
    first: str = ""  # options of a run that rows begin from, as --init {first}


class Table(NamedTuple):
    """All that one command measures."""

    title: str
    about: str
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]
    orderings: tuple[Ordering, ...]
    scales: dict[str, Scale]
    prepare: Callable[[], None] | None = None  # makes the data that rows read
    timed: bool = True  # whether the rows' training steps are timed in turn
    draw: Callable[[dict, Path], None] | None = None  # draws the page's picture from its record
    results: Callable[["Table", dict], str] | None = None  # the page's numbers, if they are laid out in another way


def product(*grids: Sequence[str]) -> tuple[str, ...]:
    """Every choice of options that takes one from each grid."""
    return tuple(map(" ".join, itertools.product(*grids)))


def of_test(name: str = "bits_per_byte", options: str = "") -> tuple[Callable, str]:
    """The pick and the report of a Measure: a number of `eval.py score` on the test split."""
    return lambda answer: answer[name], join("score --split test", options)


CARRIED = Measure("test, bits per byte", *of_test())
CLEARED = Measure("cleared", *of_test(options="--clear-memory"))


def measure(name: str, table: Table, scale_name: str, workshop: Workshop, pages: Path) -> None:
    """Train, evaluate and time what is missing of a table, and write its record NAME.json and its page NAME.md into pages."""
    scale = table.scales[scale_name]
    if table.prepare:
        table.prepare()
    chosen, trials = train_rows(table, scale, workshop)
    scale = shown(scale)
    workshop.evaluate(
        (trial, filled(m.report, row, scale)) for row in table.rows for m in table.measures for trial in trials[row.name]
    )
    rows = [measured_row(row, table, scale, workshop, chosen[row.name], trials[row.name]) for row in table.rows]
    if table.timed:
        times = step_times([settings_of(trials[row.name][0]) for row in table.rows])
        rows = [row | {"step_seconds": spent} for row, spent in zip(rows, times, strict=True)]
    record = {
        "name": name, "scale": scale_name, "date": datetime.date.today().isoformat(), "machine": machine(),
        "torch": torch.__version__.partition("+")[0], "jobs": workshop.jobs, "options": scale.options, "first": scale.first,
        "grid": list(scale.grid), "rows": rows,
    }  # fmt: skip
    write_page(name, table, record, pages)


def shown(scale: Scale) -> Scale:
    """The scale as a page has it: its sizes filled in, and FIRST for the folder of the run that rows begin from."""
    sizes = scale.sizes | {"first": "FIRST"}
    return scale._replace(options=scale.options.format_map(sizes), first=scale.first.format_map(sizes), sizes=sizes)


def measured_row(row: Row, table: Table, scale: Scale, workshop: Workshop, choice: tuple, trials: list[Trial]) -> dict:
    """The record of a row: how it was tuned, and its measures for every seed; None stands for a run that diverged."""

    def found(m: Measure, trial: Trial) -> float | None:
        return None if workshop.diverged(trial) else m.pick(workshop.answer(trial, filled(m.report, row, scale)))

    return {
        "name": row.name, "paper": row.paper, "options": filled(row.options, row, scale), "choice": choice[0],
        "tuning": {choice: None if bits == math.inf else bits for choice, bits in choice[1].items()},
        "parameters": count_parameters(settings_of(trials[0])),
        "measured": {m.title: [found(m, trial) for trial in trials] for m in table.measures},
    }  # fmt: skip


def filled(text: str, row: Row, scale: Scale) -> str:
    """Options or words of eval.py, with the sizes of the row and the scale."""
    return text.format_map(scale.sizes | {name: value.format_map(scale.sizes) for name, value in row.sizes.items()})


def write_page(name: str, table: Table, record: dict, pages: Path) -> None:
    """Write a table's record and page, and its picture if it has one; the scale is in their names unless it is small."""
    name += f"-{record['scale']}" * (record["scale"] != "small")
    for path, text in (
        (pages / f"{name}.json", json.dumps(record, indent=1) + "\n"),
        (pages / f"{name}.md", page(table, record)),
    ):
        with written_whole(path, "give another --out") as temporary:
            temporary.write_text(text)
    if table.draw:
        table.draw(record, pages / f"{name}.svg")


def train_rows(table: Table, scale: Scale, workshop: Workshop) -> tuple[dict, dict[str, list[Trial]]]:
    """Tune every row, then train all seeds; returns ({row: its choice and the tuning's scores}, {row: its trials})."""
    if scale.first:
        workshop.train([first := Trial("the first run", scale.first.format_map(scale.sizes))])
        scale = scale._replace(sizes=scale.sizes | {"first": workshop.folder(first)})
    options = {row.name: filled(join(scale.options, row.options), row, scale) for row in table.rows}
    chosen = tuned(workshop, options, scale.grid)
    trials = {name: [Trial(name, join(options[name], chosen[name][0]), seed) for seed in SEEDS] for name in options}
    workshop.train(trial for row in trials.values() for trial in row)
    return chosen, trials


def settings_of(trial: Trial) -> Settings:
    """The Settings of a trial."""
    return parse([*trial.words, "--out", "never-written"])[0]


def count_parameters(settings: Settings) -> int:
    """How many parameters a model has."""
    with torch.device("meta"):
        model = MODELS[settings.model](settings.model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def step_times(settings: Sequence[Settings]) -> list[list[float]]:
    """[[seconds per 1,000 new tokens, forward and backward, of each round]] of every row: different rows take turns."""
    variants, tokens, different = [], [], list(dict.fromkeys(settings))
    for number, row in enumerate(different):
        training = row.training
        device = choose_device(training.device, training.dtype)
        options = Namespace(batch=training.batch, device=device, dtype=training.dtype)
        model = MODELS[row.model](row.model_config).to(device)
        variants.append(rollout_variant(str(number), model, training.backprop, training.horizon, options))
        tokens.append(training.batch * training.horizon * (row.model_config.segment - getattr(row.model_config, "overlap", 0)))
    times = time_in_turn(variants, ROUNDS, device)
    found = [[1000 * spent / count for spent in times[str(number)]] for number, count in enumerate(tokens)]
    return [found[different.index(row)] for row in settings]


def machine() -> str:
    """The processor or the GPU, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    return f"{os.cpu_count()} cores of {name}"


def verdict(differences: list[float]) -> str:
    """Whether worse - better, seed by seed, agrees with an ordering."""
    agree, seeds = sum(value > 0 for value in differences), len(differences)
    if agree in (0, seeds):
        return "holds" if agree else "does not hold"
    holds = 2 * agree > seeds and statistics.mean(differences) > 0
    return f"{'within the spread' if holds else 'does not hold'} ({agree} of {seeds})"


def differences(record: dict, ordering: Ordering, first: str) -> list[float]:
    """worse - better of an ordering for each seed; `first` is the measure if it names none."""

    def values(side: str) -> list[float]:
        if " - " in side:
            return [a - b for a, b in zip(*map(values, side.split(" - ")), strict=True)]
        row, _, title = side.partition(" | ")
        measured = next(found for found in record["rows"] if found["name"] == row)["measured"][title or first]
        return [math.inf if value is None else value for value in measured]

    return [worse - better for better, worse in zip(values(ordering.better), values(ordering.worse), strict=True)]


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
    command = f"python -m accelerated.experiments {record['name']}" + (
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
    return model if model in MODELS else ""


def onward(name: str) -> str:
    """The sentence that links a page to the method's other pages."""
    if model := model_of(name):
        return f"The method is in its [chapter](../{model}.md), what else was measured in [its results]({model}.md)."
    if name.startswith("recall-"):
        return "What it says of the methods is in [what a memory can hold](recall.md)."
    return "The methods are [side by side](../index.md)."


def wrapped(text: str) -> str:
    """Paragraphs of prose, wrapped."""
    return "\n\n".join(textwrap.fill(" ".join(part.split()), WIDTH, break_on_hyphens=False) for part in text.split("\n\n"))


def picture(table: Table, record: dict) -> str:
    """The line that shows the page's picture."""
    return f"![{table.title}]({record['name']}.svg)"


def markdown(*rows: Sequence[str]) -> str:
    """A table in Markdown; the first row is its head."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def results(table: Table, record: dict) -> str:
    """The measured numbers: a row each, or if there are many measures a column each."""
    forms = {m.title: m.form for m in table.measures}
    cells = {
        row["name"]: {title: mean_and_spread(values, forms[title]) for title, values in row["measured"].items()}
        for row in record["rows"]
    }
    if len(cells) <= 3 < len(forms):
        return markdown(["", *cells], *([title, *(own.get(title, "") for own in cells.values())] for title in forms))
    paper = {row["name"]: row["paper"] for row in record["rows"]}
    head = ["", *forms, *(["the paper"] if any(paper.values()) else [])]
    rows = ([name, *(own.get(title, "") for title in forms), *([paper[name]] if len(head) > len(forms) + 1 else [])]
            for name, own in cells.items())  # fmt: skip
    return markdown(head, *rows)


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
    return f"## {whose.capitalize()} orderings\n\n{wrapped(text)}\n\n{markdown(*rows)}"


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


def cost(record: dict) -> str:
    """Parameters, speed and the tuned choice of each row."""
    names, rows, choices = *names_and_rows(record), record["grid"]
    title, text = "## Cost", "No row was tuned: all have the learning rate of the settings below."
    if was_tuned := len(choices) > 1:
        title = "## Cost and tuning"
        text = f"Every row was tuned on seed 0 by its last validation, each over {', '.join(f'`{c}`' for c in choices)}."
    columns = {"": names, "parameters": [f"{row['parameters']:,}" for row in rows]}
    if "step_seconds" in rows[0]:
        text += """ Speeds are medians of forward and backward passes of a training step that took turns; times are over the first
        row's, median (least..most)."""
        columns["tokens/s in training"], columns["time for a token"] = zip(*(speed(row, rows[0]) for row in rows), strict=True)
    if was_tuned:
        columns["tuned"] = [f"`{row['choice']}`" for row in rows]
    cells = markdown([*columns], *zip(*columns.values(), strict=True))
    return "\n\n".join(filter(None, [title, wrapped(text), cells, at_an_end(record)]))


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
    text = "Best at an end of the grid, with how much better than the next choice in bits per byte of validation text: "
    return wrapped(f"{text}{', '.join(found)}.") if found else ""


def speed(row: dict, first: dict) -> list[str]:
    """A row's new tokens per second, and its time for one over the first row's, pair by pair."""
    ratios = paired_ratios(row["step_seconds"], first["step_seconds"])
    return [f"{1000 / statistics.median(row['step_seconds']):,.0f}", spread(ratios, ".2f")]


def last_of_each(options: str) -> str:
    """Options without those that a later one of the same name replaces."""
    return shlex.join(word for name, values in settled(options).items() for word in (name, *values))


def settings_part(record: dict) -> str:
    """The options, to make every row again."""
    lines = [f"all      {record['options']}"] + ([f"FIRST    {record['first']}"] if record["first"] else [])
    lines += [f"{name:<24} {last_of_each(row['options'])}" for name, row in zip(*names_and_rows(record), strict=True)]
    wrapped_lines = (textwrap.wrap(line, WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False) for line in lines)
    text = "Options of `train.py`: those of all rows, then each row's own"
    text += "; FIRST is the run that all begin from." if record["first"] else "."
    return "## Settings\n\n" + text + "\n\n```text\n" + "\n".join(line for group in wrapped_lines for line in group) + "\n```"
