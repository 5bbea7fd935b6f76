"""Measures a table: tunes, trains and evaluates its rows, times their steps, and writes the record and the page."""

import datetime
import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from accelerated.evaluation.figures import figure_class
from accelerated.lab.speed.timing import time_in_turn
from accelerated.lab.speed.variants import model_on_meta, rollout
from accelerated.lab.systems.speech import read_aloud
from accelerated.lab.tables.notes import draw
from accelerated.lab.tables.page import names_and_rows, page
from accelerated.lab.tables.table import Table
from accelerated.lab.trials import (
    HEADLINE_SEEDS,
    LOG,
    LOG_NUMBERS,
    SEEDS,
    Trial,
    Workshop,
    join,
    machine,
)
from accelerated.models import model_class
from accelerated.program.files import written_whole
from accelerated.protocol import overlap_of
from accelerated.training.options import parse
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import Settings

ROUNDS = 15  # in which the rows' training steps take turns
PREPARE = {"speech": lambda: read_aloud(Path("runs/speech"))}


def measure(name: str, table: Table, workshop: Workshop, pages: Path) -> None:
    """Train, evaluate and time what is missing of a table; write its record NAME.json, page NAME.md and picture into pages.

    Then say which folders hold each row's runs, for eval.py.
    """
    if table.picture:
        figure_class()  # says now if matplotlib is missing
    if table.prepare:
        PREPARE[table.prepare]()
    tuning, trials = train_rows(table, workshop)
    workshop.evaluate(
        (t, m.words(row))
        for name, row in table.rows.items()
        for m in table.measures
        for t in trials[name]
    )
    rows = [record_of_row(table, name, tuning[name], trials[name], workshop) for name in table.rows]
    if table.timed:
        times = step_times([settings_of(trials[name][0]) for name in table.rows])
        rows = [row | {"step_seconds": seconds} for row, seconds in zip(rows, times, strict=True)]
    record = {"name": name, "date": datetime.date.today().isoformat(), "machine": machine()}
    record |= {
        "torch": torch.__version__.partition("+")[0],
        "jobs": workshop.jobs,
        "options": table.options,
    }
    record |= {
        "first": table.first,
        "grid": table.grid,
        "rows": rows,
        "tuned_by": table.tuned_by[1],
    }
    for kind, text in (("json", json.dumps(record, indent=1) + "\n"), ("md", page(table, record))):
        with written_whole(pages / f"{name}.{kind}", "give another --out") as temporary:
            temporary.write_text(text)
    if table.picture:
        draw(table, record, pages / f"{name}.svg")
    for label, row in names_and_rows(record):
        workshop.say(
            f"{label}: {' '.join(str(workshop.folder(trial)) for trial in trials[row['name']])}"
        )


def train_rows(
    table: Table, workshop: Workshop
) -> tuple[dict[str, dict[str, float]], dict[str, list[Trial]]]:
    """Tune every row, then train its seeds; returns ({row: {choice: bits per byte on seed 0}}, {row: its trials})."""
    first = Trial("the first run", table.first)
    if table.first:
        workshop.train([first])
    folder, score, tuning = str(workshop.folder(first)), LOG_NUMBERS[table.tuned_by[0]], {}
    options = {
        name: join(table.options, row.options).replace("FIRST", folder)
        for name, row in table.rows.items()
    }
    workshop.train(
        Trial(name, join(of_row, choice))
        for name, of_row in options.items()
        for choice in table.grid
    )
    for name, of_row in options.items():
        logs = {
            choice: workshop.answer(Trial(name, join(of_row, choice)), LOG) for choice in table.grid
        }
        tuning[name] = {choice: score(log) for choice, log in logs.items()}
    seeds = {name: HEADLINE_SEEDS if name in table.headline else SEEDS for name in options}
    trials = {
        name: [Trial(name, join(options[name], best(tuning[name])), seed) for seed in seeds[name]]
        for name in options
    }
    workshop.train(trial for of_row in trials.values() for trial in of_row)
    return tuning, trials


def best(tuning: dict[str, float]) -> str:
    """The choice with the fewest bits; of a tie the earlier one."""
    return min(tuning, key=tuning.get)


def record_of_row(
    table: Table, name: str, tuning: dict[str, float], trials: list[Trial], workshop: Workshop
) -> dict:
    """How a row was tuned, and its measures for every seed; None stands for a run that diverged."""
    row = table.rows[name]
    measured = {
        m.title: [
            None if workshop.diverged(trial) else m.pick(workshop.answer(trial, m.words(row)))
            for trial in trials
        ]
        for m in table.measures
    }
    finite = {choice: None if math.isinf(bits) else bits for choice, bits in tuning.items()}
    settings = settings_of(trials[0])
    parameters = sum(
        parameter.numel()
        for parameter in model_on_meta(settings.model, settings.model_config).parameters()
    )
    record = {
        "name": name,
        "paper": row.paper,
        "options": row.options,
        "choice": best(tuning),
        "tuning": finite,
    }
    return record | {"parameters": parameters, "measured": measured}


def settings_of(trial: Trial) -> Settings:
    """The Settings of a trial."""
    return parse([*trial.words, "--out", "never-written"])[0]


def step_times(settings: Sequence[Settings]) -> list[list[float]]:
    """[[seconds per 1,000 new tokens, forward and backward, of each round]] of every row: different rows take turns."""
    keep_freed_memory()  # as train.py does
    steps, tokens = {}, {}
    for row in dict.fromkeys(settings):
        training = row.training
        device = choose_device(training.device)
        options = Namespace(batch=training.batch, device=device, dtype=training.dtype)
        model = model_class(row.model)(row.model_config).to(device)
        steps[row] = rollout(model, training.backprop, training.horizon, options).step
        tokens[row] = (
            training.batch
            * training.horizon
            * (row.model_config.segment - overlap_of(row.model_config))
        )
    times = time_in_turn(steps, ROUNDS, device)
    return [[1000 * seconds / tokens[row] for seconds in times[row]] for row in settings]
