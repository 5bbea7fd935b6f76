"""Measures a table: tunes, trains and evaluates its rows, times their steps, and writes the record and the page."""

import datetime
import json
import math
import os
import platform
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from accelerated.lab.speed.horizons import rollout_variant
from accelerated.lab.speed.timing import time_in_turn
from accelerated.lab.tables.page import names_and_rows, page, stem
from accelerated.lab.tables.table import Measure, Row, Scale, Table, filled, shown
from accelerated.lab.trials import SEEDS, Trial, Workshop, join, tuned
from accelerated.models import model_class
from accelerated.program.files import written_whole
from accelerated.training.log import figure_class
from accelerated.training.options import parse
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import Settings

ROUNDS = 15  # in which the rows' training steps take turns


def measure(name: str, table: Table, scale_name: str, workshop: Workshop, pages: Path) -> None:
    """Train, evaluate and time what is missing of a table; write its record NAME.json and its page NAME.md into pages.

    Then say which folders hold each row's runs, for eval.py.
    """
    scale = table.scales[scale_name]
    if table.draw:
        figure_class()  # says now if matplotlib is missing
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
        "grid": list(scale.grid), "rows": rows, "tuned_by": table.tuned_by[0],
    }  # fmt: skip
    write_page(name, table, record, pages)
    for label, row in zip(*names_and_rows(record), strict=True):
        workshop.say(f"{label}: {' '.join(str(workshop.folder(trial)) for trial in trials[row['name']])}")


def train_rows(table: Table, scale: Scale, workshop: Workshop) -> tuple[dict, dict[str, list[Trial]]]:
    """Tune every row, then train all seeds; returns ({row: its choice and the tuning's scores}, {row: its trials})."""
    if scale.first:
        workshop.train([first := Trial("the first run", scale.first.format_map(scale.sizes))])
        scale = scale._replace(sizes=scale.sizes | {"first": workshop.folder(first)})
    options = {row.name: filled(join(scale.options, row.options), row, scale) for row in table.rows}
    chosen = tuned(workshop, options, scale.grid, table.tuned_by[1])
    trials = {name: [Trial(name, join(options[name], chosen[name][0]), seed) for seed in SEEDS] for name in options}
    workshop.train(trial for row in trials.values() for trial in row)
    return chosen, trials


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


def settings_of(trial: Trial) -> Settings:
    """The Settings of a trial."""
    return parse([*trial.words, "--out", "never-written"])[0]


def count_parameters(settings: Settings) -> int:
    """How many parameters a model has."""
    with torch.device("meta"):
        model = model_class(settings.model)(settings.model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def step_times(settings: Sequence[Settings]) -> list[list[float]]:
    """[[seconds per 1,000 new tokens, forward and backward, of each round]] of every row: different rows take turns."""
    keep_freed_memory()  # as train.py does
    variants, tokens, different = [], [], list(dict.fromkeys(settings))
    for number, row in enumerate(different):
        training = row.training
        device = choose_device(training.device, training.dtype)
        options = Namespace(batch=training.batch, device=device, dtype=training.dtype)
        model = model_class(row.model)(row.model_config).to(device)
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


def write_page(name: str, table: Table, record: dict, pages: Path) -> None:
    """Write a table's record and page, and its picture if it has one."""
    scale = record["scale"]
    for kind, text in (("json", json.dumps(record, indent=1) + "\n"), ("md", page(table, record))):
        with written_whole(pages / f"{stem(name, scale)}.{kind}", "give another --out") as temporary:
            temporary.write_text(text)
    if table.draw:
        table.draw(record, pages / f"{stem(table.picture or name, scale)}.svg")
