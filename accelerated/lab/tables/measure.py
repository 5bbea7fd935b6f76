"""Measures a table: trains and evaluates its rows, times their steps, writes record and page."""

import itertools
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from accelerated.lab.harness import ADVICE, RESULTS, origin, read_record, write_page, write_record
from accelerated.lab.speed.timing import time_in_turn
from accelerated.lab.speed.variants import model_on_meta, prepared_step
from accelerated.lab.tables.page import numbers, page
from accelerated.lab.tables.picture import draw
from accelerated.lab.tables.table import TABLES, Table
from accelerated.lab.trials import Trial, Workshop, join, validation
from accelerated.models import model_class
from accelerated.program.errors import InputError
from accelerated.protocol import overlap_of
from accelerated.training.optimization import count_parameters
from accelerated.training.options import parse
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import Settings

ROUNDS = 45  # in which the rows' training steps take turns; of 15 medians differed by 0.05


def measure(options: Namespace, workshop: Workshop) -> None:
    """Measure the table that `options` name, unless its record is there, and write its page.

    Of some of its rows and seeds the record alone is written, and printed. Raises InputError if a
    record is of other options than its table.
    """
    name = options.name
    table = TABLES[name]
    wanted = {row: options.seeds or table.seeds[row] for row in options.rows or table.rows}
    path = options.out / f"{name}.json"
    is_whole = wanted == table.seeds
    if is_whole and path.exists():
        record = read_record(path, {"rows", "options"})
        check_options(path, record, table)
    else:
        record = measured_record(name, table, wanted, workshop)
        write_record(path, record, indent=1)
    if not is_whole:
        print(numbers(table, record))
        return
    whole = options.out / f"{table.page}.json"
    if whole.exists():
        draw(table, record, path.with_suffix(".svg"))
        path = whole
        table = TABLES[table.page]
        record = read_record(path, {"rows"})
    write_page(path, record, partial(page, table), partial(draw, table))


def check_options(path: Path, record: dict, table: Table) -> None:
    """Raise InputError if a record has not all of a table's rows, with its options and seeds."""
    found = {row["name"]: (row["options"].strip(), row["seeds"]) for row in record["rows"]}
    own = {name: (row.options, [*table.seeds[name]]) for name, row in table.rows.items()}
    if (record["options"], found) != (table.options, own):
        raise InputError(f"{path} has runs of other options than its table; {ADVICE}")


def measured_record(
    name: str, table: Table, wanted: Mapping[str, Sequence[int]], workshop: Workshop
) -> dict:
    """The record of {row: seeds}: trained, evaluated, and their steps timed."""
    grids = choices(name, table, wanted)
    tuning, trials = train_rows(table, workshop, wanted, grids)
    asked = itertools.product(itertools.chain(*trials.values()), table.measures)
    answers = workshop.evaluate(
        (trial, each.words(table.rows[trial.name])) for trial, each in asked
    )
    rows = []
    for row, of_row in trials.items():
        rows.append(record_of_row(table, row, tuning[row], of_row, answers))
        workshop.say(f"{row}: {' '.join(str(workshop.folder(trial)) for trial in of_row)}")
    settings = [settings_of(of_row[0]) for of_row in trials.values()]
    torch.set_num_threads(workshop.threads)  # as the runs were trained
    for row, seconds in zip(rows, step_times(settings), strict=True):
        row["step_seconds"] = seconds
    return origin() | {
        "name": name,
        "options": table.options,
        "first": table.first,
        "grid": table.grid if grids == dict.fromkeys(wanted, table.grid) else [],
        "rows": rows,
    }


def choices(name: str, table: Table, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """{row: its choices of options}: the table's, of a part the published one if there is one."""
    grids = dict.fromkeys(wanted, table.grid)
    path = RESULTS / f"{name}.json"
    if wanted != table.seeds and path.exists():
        for row in read_record(path, {"rows"})["rows"]:
            if row["name"] in wanted:
                grids[row["name"]] = [row["choice"]]
    return grids


def train_rows(
    table: Table,
    workshop: Workshop,
    wanted: Mapping[str, Sequence[int]],
    grids: Mapping[str, list[str]],
) -> tuple[dict[str, dict[str, float]], dict[str, list[Trial]]]:
    """Tune rows {row: seeds} on seed 0, each among its choices, and train the best with all seeds.

    Returns ({row: {choice: bits per byte on seed 0}}, {row: its trials}). Raises InputError if one
    of these diverges.
    """
    first = Trial("the first run", table.first)
    if table.first:
        workshop.train([first])
    begun = str(workshop.folder(first))

    def trial_of(name: str, choice: str, seed: int) -> Trial:
        options = join(table.options, table.rows[name].options, choice)
        return Trial(name, options.replace("FIRST", begun), seed)

    def tuning_of(name: str) -> dict[str, float]:
        logs = {choice: workshop.log(trial_of(name, choice, 0)) for choice in grids[name]}
        return {choice: validation(log) for choice, log in logs.items()}

    tuned = [name for name, own in grids.items() if len(own) > 1]
    workshop.train(trial_of(name, choice, 0) for name in tuned for choice in grids[name])
    trials = {}
    for name, seeds in wanted.items():
        chosen = best(tuning_of(name))
        trials[name] = [trial_of(name, chosen, seed) for seed in seeds]
    every = [trial for of_row in trials.values() for trial in of_row]
    workshop.train(every)
    for trial in every:
        if math.isinf(validation(workshop.log(trial))):
            raise InputError(f"{trial.name}, seed {trial.seed}, diverged; try lower rates")
    return {name: tuning_of(name) for name in wanted}, trials


def best(tuning: dict[str, float]) -> str:
    """The choice with the fewest bits; of a tie the earlier one."""
    return min(tuning, key=tuning.__getitem__)


def record_of_row(
    table: Table, name: str, tuning: dict[str, float], trials: list[Trial], answers: dict
) -> dict:
    """How a row was tuned, and its measures for every seed."""
    row = table.rows[name]
    settings = settings_of(trials[0])
    measured = {}
    for each in table.measures:
        of_seeds = [answers[trial, each.words(row)] for trial in trials]
        measured[each.title] = [each.pick(answer) for answer in of_seeds]
    return {
        "name": name,
        "paper": row.paper,
        "options": row.options,
        "choice": best(tuning),
        "tuning": {c: None if math.isinf(bits) else bits for c, bits in tuning.items()},
        "parameters": count_parameters(model_on_meta(settings.model, settings.model_config)),
        "seeds": [trial.seed for trial in trials],
        "measured": measured,
    }


def settings_of(trial: Trial) -> Settings:
    """The Settings of a trial."""
    settings, _ = parse([*trial.words, "--out", "never-written"])
    return settings


def step_times(settings: Sequence[Settings]) -> list[list[float]]:
    """[[seconds per 1,000 new tokens, forward and backward, of each round]] of every row.

    Different rows take turns.
    """
    keep_freed_memory()  # as train.py does
    device = choose_device(settings[0].training.device)
    steps = {}
    for row in dict.fromkeys(settings):
        training = row.training
        options = Namespace(batch=training.batch, device=device, dtype=training.dtype)
        model = model_class(row.model)(row.model_config).to(device)
        steps[row] = prepared_step(model, training, options).step
    times = time_in_turn(steps, ROUNDS, device)
    return [[1000 * seconds / new_tokens(row) for seconds in times[row]] for row in settings]


def new_tokens(settings: Settings) -> int:
    """The tokens of an iteration that no window has read before."""
    new = settings.model_config.segment - overlap_of(settings.model_config)
    return settings.training.batch * settings.training.horizon * new
