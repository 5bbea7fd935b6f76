"""Measures a table: trains and evaluates its rows, times their steps, writes record and page."""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from accelerated.data.recall import chances
from accelerated.lab.harness import (
    ADVICE,
    RESULTS,
    origin,
    part_in_words,
    read_record,
    write_page,
    write_record,
)
from accelerated.lab.speed.timing import time_in_turn
from accelerated.lab.speed.variants import model_on_meta, prepared_step
from accelerated.lab.tables.orderings import seeds_of
from accelerated.lab.tables.page import page
from accelerated.lab.tables.picture import draw
from accelerated.lab.tables.table import TABLES, Table
from accelerated.lab.trials import Trial, Workshop, join, validation
from accelerated.models import model_class
from accelerated.program.errors import InputError
from accelerated.protocol import overlap_of
from accelerated.training.checkpoint import load_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.options import parse
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import Settings

ROUNDS = 45  # in which the rows' training steps take turns; of 15 medians differed by 0.05


def measure(
    name: str,
    rows: Sequence[str] | None,
    seeds: Sequence[int] | None,
    workshop: Workshop,
    pages: Path,
) -> None:
    """Measure a table, or some rows and seeds of it, unless its record in `pages` has them.

    Write NAME.json and NAME.svg, and the page that shows them. Raises InputError if the record
    there is of other options, or has more: a part takes the place of no whole.
    """
    table = TABLES[name]
    wanted = {row: seeds or table.seeds[row] for row in rows or table.rows}
    path = pages / f"{name}.json"
    record = read_record(path, {"rows", "grid"}) if path.exists() else None
    if record:
        check_options(path, record, table)
        kept = {row["name"]: seeds_of(row) for row in record["rows"]}
        if part_in_words(wanted, kept):
            raise InputError(f"{path} has more rows or seeds than are asked for; {ADVICE}")
        if part_in_words(kept, wanted):
            record = None
    if record is None:
        record = measured_record(name, table, wanted, workshop)
        write_record(path, record, indent=1)
    whole = pages / f"{table.page}.json"
    if whole.exists():
        draw(table, record, path.with_suffix(".svg"))
        path = whole
        table = TABLES[table.page]
        record = read_record(path, {"rows", "grid"})
    write_page(path, record, partial(page, table), partial(draw, table))


def check_options(path: Path, record: dict, table: Table) -> None:
    """Raise InputError if a record is of other options than its table has now."""
    rows = {row["name"]: row["options"].strip() for row in record["rows"]}
    own = {name: row.options for name, row in table.rows.items() if name in rows}
    if (record["options"], rows) != (table.options, own):
        raise InputError(f"{path} has runs of other options than its table; {ADVICE}")


def measured_record(
    name: str, table: Table, wanted: Mapping[str, Sequence[int]], workshop: Workshop
) -> dict:
    """The record of {row: seeds}: trained, evaluated, and their steps timed."""
    grids = choices(name, table, wanted)
    tuning, trials = train_rows(table, workshop, wanted, grids)
    workshop.evaluate(questions(table, trials))
    rows = []
    for row, of_row in trials.items():
        measured = measured_numbers(table, row, of_row, workshop)
        rows.append(record_of_row(table, row, tuning[row], of_row, measured))
        workshop.say(f"{row}: {' '.join(str(workshop.folder(trial)) for trial in of_row)}")
    if table.timed:
        torch.set_num_threads(workshop.threads)  # as the runs were trained
        settings = [settings_of(of_row[0]) for of_row in trials.values()]
        for row, seconds in zip(rows, step_times(settings), strict=True):
            row["step_seconds"] = seconds
    one = next(iter(trials.values()))[0]
    return origin() | {
        "name": name,
        "corpus": corpus_of(one, workshop),
        "jobs": workshop.jobs,
        "options": table.options,
        "first": table.first,
        "grid": table.grid if grids == dict.fromkeys(wanted, table.grid) else [],
        "rows": rows,
        "chances": chances_of([*wanted], settings_of(one)),
    }


def choices(name: str, table: Table, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """{row: its choices of options}: the table's, of a part the published one if there is one."""
    path = RESULTS / f"{name}.json"
    is_part = part_in_words(wanted, table.seeds)
    published = read_record(path, {"rows"})["rows"] if is_part and path.exists() else []
    found = {row["name"]: [row["choice"]] for row in published}
    return {row: found.get(row, table.grid) for row in wanted}


def corpus_of(trial: Trial, workshop: Workshop) -> str:
    """The digest of what a trained trial has read; empty if its documents are generated."""
    path = checkpoint_path(workshop.folder(trial))
    return load_checkpoint(path)["corpus"] if path.exists() else ""


def chances_of(rows: Sequence[str], settings: Settings) -> dict[str, dict[str, float]]:
    """{what is known: {b: share of right answers}} without a memory, of rows "a: b".

    It is {} if no answers are asked for.
    """
    if settings.data.data != "recall":
        return {}
    columns = [name.partition(": ")[2] for name in rows]
    shares = chances(settings.recall)
    return {known: dict.fromkeys(columns, share) for known, share in shares.items()}


def train_rows(
    table: Table,
    workshop: Workshop,
    wanted: Mapping[str, Sequence[int]],
    grids: Mapping[str, list[str]],
) -> tuple[dict[str, dict[str, float]], dict[str, list[Trial]]]:
    """Tune rows {row: seeds} on seed 0, each among its choices, and train the best with all seeds.

    Returns ({row: {choice: bits per byte on seed 0}}, {row: its trials}).
    """

    first = Trial("the first run", table.first)
    begun = str(workshop.folder(first))

    def trial_of(name: str, choice: str, seed: int) -> Trial:
        options = join(table.options, table.rows[name].options).replace("FIRST", begun)
        return Trial(name, join(options, choice), seed)

    def train(runs: list[tuple[str, str, int]]) -> None:
        workshop.train(trial_of(*run) for run in runs)

    def tuning_of(name: str) -> dict[str, float]:
        logs = {choice: workshop.log(trial_of(name, choice, 0)) for choice in grids[name]}
        return {choice: validation(log) for choice, log in logs.items()}

    if table.first:
        workshop.train([first])
    tuned = [name for name, own in grids.items() if len(own) > 1]
    train([(name, choice, 0) for name in tuned for choice in grids[name]])
    chosen = {name: best(tuning_of(name)) for name in wanted}
    train([(name, chosen[name], seed) for name, seeds in wanted.items() for seed in seeds])
    trials = {}
    for name, seeds in wanted.items():
        trials[name] = [trial_of(name, chosen[name], seed) for seed in seeds]
    return {name: tuning_of(name) for name in wanted}, trials


def questions(table: Table, trials: dict[str, list[Trial]]) -> Iterator[tuple[Trial, str]]:
    """What eval.py is asked about the trials of a table's rows: (trial, words of eval.py)."""
    for name, of_row in trials.items():
        for each in table.measures:
            for trial in of_row:
                yield trial, each.words(table.rows[name])


def best(tuning: dict[str, float]) -> str:
    """The choice with the fewest bits; of a tie the earlier one."""
    return min(tuning, key=lambda choice: tuning[choice])


def measured_numbers(
    table: Table, name: str, trials: list[Trial], workshop: Workshop
) -> dict[str, list]:
    """{title: its number for every trial} of a row's measures; None if a run diverged."""
    numbers = {}
    for each in table.measures:
        answers = [workshop.answer(trial, each.words(table.rows[name])) for trial in trials]
        numbers[each.title] = [answer and each.pick(answer) for answer in answers]
    return numbers


def record_of_row(
    table: Table, name: str, tuning: dict[str, float], trials: list[Trial], measured: dict
) -> dict:
    """How a row was tuned, and its measures for every seed."""
    row = table.rows[name]
    return {
        "name": name,
        "paper": row.paper,
        "options": row.options,
        "choice": best(tuning),
        "tuning": {c: None if math.isinf(bits) else bits for c, bits in tuning.items()},
        "parameters": parameters_of(settings_of(trials[0])),
        "seeds": [trial.seed for trial in trials],
        "measured": measured,
    }


def settings_of(trial: Trial) -> Settings:
    """The Settings of a trial."""
    settings, _ = parse([*trial.words, "--out", "never-written"])
    return settings


def parameters_of(settings: Settings) -> int:
    """How many numbers the model of these settings trains."""
    parameters = model_on_meta(settings.model, settings.model_config).parameters()
    return sum(parameter.numel() for parameter in parameters)


def step_times(settings: Sequence[Settings]) -> list[list[float]]:
    """[[seconds per 1,000 new tokens, forward and backward, of each round]] of every row.

    Different rows take turns.
    """
    keep_freed_memory()  # as train.py does
    device = choose_device(settings[0].training.device)
    steps = {}
    tokens = {}
    for row in dict.fromkeys(settings):
        config = row.model_config
        training = row.training
        options = Namespace(batch=training.batch, device=device, dtype=training.dtype)
        model = model_class(row.model)(config).to(device)
        steps[row] = prepared_step(model, training, options).step
        new = config.segment - overlap_of(config)
        tokens[row] = training.batch * training.horizon * new
    times = time_in_turn(steps, ROUNDS, device)
    return [[1000 * seconds / tokens[row] for seconds in times[row]] for row in settings]
