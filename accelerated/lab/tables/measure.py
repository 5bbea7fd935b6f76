"""Measures a table: trains and evaluates its rows, times their steps, writes record and page."""

import datetime
import json
import math
import platform
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from accelerated.data.recall import chances
from accelerated.evaluation.figures import figure_class
from accelerated.lab.experiment import read_record
from accelerated.lab.speed.timing import time_in_turn
from accelerated.lab.speed.variants import model_on_meta, rollout
from accelerated.lab.systems.speech import read_aloud
from accelerated.lab.tables.notes import draw
from accelerated.lab.tables.page import page
from accelerated.lab.tables.table import TABLES, Table
from accelerated.lab.trials import (
    FIRST_ENDS,
    HEADLINE_SEEDS,
    SEEDS,
    Trial,
    Workshop,
    join,
    machine,
    settled,
    validation,
)
from accelerated.models import model_class
from accelerated.program.errors import InputError
from accelerated.program.files import written_whole
from accelerated.protocol import overlap_of
from accelerated.training.checkpoint import load_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.optimization import backprop_of, prepare_layers
from accelerated.training.options import parse
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import Settings

ROUNDS = 45  # in which the rows' training steps take turns; of 15 medians differed by 0.05
SPEECH = Path("runs/speech")
ADVICE = "give another --out"


def measure(name: str, table: Table, workshop: Workshop, pages: Path) -> None:
    """Train, evaluate and time what is missing of a table; write its page and record.

    They are NAME.md and NAME.json in pages, and the picture NAME.svg. Then say which folders hold
    each row's runs, for eval.py.
    """
    figure_class()  # says now if matplotlib is missing
    if table.reads_speech:
        read_aloud(SPEECH)
    tuning, trials = train_rows(table, workshop)
    workshop.evaluate(questions(table, trials))
    rows = [record_of_row(table, name, tuning[name], trials[name], workshop) for name in table.rows]
    if table.timed and workshop.seconds_left > 0:
        torch.set_num_threads(workshop.threads)  # as the runs were trained
        settings = [settings_of(trials[name][0]) for name in table.rows]
        for row, seconds in zip(rows, step_times(settings), strict=True):
            row["step_seconds"] = seconds

    one = trials[next(iter(trials))][0]
    record = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),  # whose library --data stdlib is
        "corpus": corpus_of(one, workshop),
        "jobs": workshop.jobs,
        "minutes": None if math.isinf(workshop.minutes) else workshop.minutes,
        "options": table.options,
        "first": table.first,
        "grid": table.grid,
        "rows": rows,
        "chances": chances_of(table, settings_of(one)),
    }
    with written_whole(pages / f"{name}.json", ADVICE) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
    with written_whole(pages / f"{name}.md", ADVICE) as temporary:
        temporary.write_text(page(table, record))
    draw(table, record, pages / f"{name}.svg")
    for row, of_row in trials.items():
        folders = [str(workshop.folder(trial)) for trial in of_row]
        workshop.say(f"{row}: {' '.join(folders)}")


def corpus_of(trial: Trial, workshop: Workshop) -> str:
    """The digest of what a trained trial has read; empty if its documents are generated."""
    path = checkpoint_path(workshop.folder(trial))
    return load_checkpoint(path)["corpus"] if path.exists() else ""


def chances_of(table: Table, settings: Settings) -> dict[str, dict[str, float]]:
    """{what is known: {b: share of right answers}} without a memory, of a table of rows "a: b".

    It is {} if no answers are asked for.
    """
    if settings.data.data != "recall":
        return {}
    found: dict[str, dict[str, float]] = {}
    for name, row in table.rows.items():
        column = name.partition(": ")[2]
        facts = settled(row.asked).get("--recall-pairs", [settings.recall.pairs])
        recall = replace(settings.recall, pairs=int(facts[0]))
        for known, share in chances(recall).items():
            found.setdefault(known, {})[column] = share
    return found


def measure_again(
    name: str, rows: Sequence[str], seeds: Sequence[int], workshop: Workshop, pages: Path
):
    """Train rows of a published table again, each with its own choice, beside what stands there.

    Nothing is written. The records hold Python's version, whose library `--data stdlib` reads, and
    a digest of the text: another text gives other numbers. Raises InputError if there is no record,
    or it lacks one of the rows.
    """
    path = pages / f"{name}.json"
    if not path.exists():
        raise InputError(f"{path} is not there; measure the whole table, without --rows or --seeds")
    record = read_record(path, {"rows"})
    table = TABLES[name]
    published = {row["name"]: row for row in record["rows"]}
    for row in rows:
        if row not in published:
            raise InputError(f"{path} has no row {row}; measure the whole table, without --rows")
    chosen = {row: [published[row]["choice"]] for row in rows}
    _, trials = train_rows(table, workshop, chosen, seeds)
    workshop.evaluate(questions(table, trials))
    for row, of_row in trials.items():
        for title, values in measured(table, row, of_row, workshop).items():
            before = published[row]["measured"][title]
            seen = f"seeds {seeds}: {values}, in the record {before}"
            workshop.say(f"{row}, {title}, {seen}")
    corpus = corpus_of(trials[rows[0]][0], workshop)
    for what, here in (("python", platform.python_version()), ("corpus", corpus)):
        workshop.say(f"{what}: {here}, in the record {record.get(what, 'not said')}")


def train_rows(
    table: Table,
    workshop: Workshop,
    grids: dict[str, list[str]] | None = None,
    seeds: Sequence[int] = (),
) -> tuple[dict[str, dict[str, float]], dict[str, list[Trial]]]:
    """Tune rows on seed 0, each among its choices, then train the best choice with all seeds.

    grids are {row: its choices}. They and the seeds are the table's, unless others are given.
    Returns ({row: {choice: bits per byte on seed 0}}, {row: its trials}).
    """
    grids = grids or dict.fromkeys(table.rows, table.grid)

    def seeds_of(name: str) -> Sequence[int]:
        return seeds or (HEADLINE_SEEDS if name in table.headline else SEEDS)

    def first_of(name: str, seed: int) -> Trial:
        own = table.rows[name].first
        return Trial(name, own, seed) if own else Trial("the first run", table.first)

    def trial_of(name: str, choice: str, seed: int) -> Trial:
        begun = str(workshop.folder(first_of(name, seed)))
        options = join(table.options, table.rows[name].options).replace("FIRST", begun)
        return Trial(name, join(options, choice), seed)

    firsts = [first_of(name, seed) for name in grids for seed in seeds_of(name)]
    workshop.train([first for first in firsts if first.options], FIRST_ENDS)
    tried = {}  # {row: {choice: its trial}}
    several = []  # trials of rows with several choices
    for name, choices in grids.items():
        tried[name] = {choice: trial_of(name, choice, 0) for choice in choices}
        if len(choices) > 1:
            several += tried[name].values()
    workshop.train(several)

    def tuning_of(choices: dict[str, Trial]) -> dict[str, float]:
        return {choice: validation(workshop.log(trial)) for choice, trial in choices.items()}

    trials = {}
    for name, choices in tried.items():
        choice = best(tuning_of(choices))
        trials[name] = [trial_of(name, choice, seed) for seed in seeds_of(name)]
    workshop.train(trial for of_row in trials.values() for trial in of_row)
    return {name: tuning_of(choices) for name, choices in tried.items()}, trials


def questions(table: Table, trials: dict[str, list[Trial]]) -> Iterator[tuple[Trial, str]]:
    """What eval.py is asked about the trials of a table's rows: (trial, words of eval.py)."""
    for name, of_row in trials.items():
        for each in table.measures:
            for trial in of_row:
                yield trial, each.words(table.rows[name])


def best(tuning: dict[str, float]) -> str:
    """The choice with the fewest bits; of a tie the earlier one."""
    return min(tuning, key=lambda choice: tuning[choice])


def measured(table: Table, name: str, trials: list[Trial], workshop: Workshop) -> dict[str, list]:
    """{title: its number for every trial} of a row's measures; None if a run has no answer."""
    numbers = {}
    for each in table.measures:
        numbers[each.title] = []
        for trial in trials:
            answer = workshop.answer(trial, each.words(table.rows[name]))
            numbers[each.title].append(None if answer is None else each.pick(answer))
    return numbers


def record_of_row(
    table: Table, name: str, tuning: dict[str, float], trials: list[Trial], workshop: Workshop
) -> dict:
    """How a row was tuned, and its measures for every seed."""
    row = table.rows[name]
    return {
        "name": name,
        "paper": row.paper,
        "options": row.options,
        "first": row.first,
        "choice": best(tuning),
        "tuning": {c: None if math.isinf(bits) else bits for c, bits in tuning.items()},
        "parameters": parameters_of(settings_of(trials[0])),
        "measured": measured(table, name, trials, workshop),
        "updates": [workshop.updates(trial) for trial in trials],
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
        prepare_layers(model, training)
        backprop = backprop_of(model, training)
        steps[row] = rollout(model, backprop, training.horizon, options).step
        new = config.segment - overlap_of(config)
        tokens[row] = training.batch * training.horizon * new
    times = time_in_turn(steps, ROUNDS, device)
    return [[1000 * seconds / tokens[row] for seconds in times[row]] for row in settings]
