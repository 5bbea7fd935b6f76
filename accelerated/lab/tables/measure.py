"""Measures a table: trains and evaluates its rows, times their steps, writes record and page."""

import datetime
import json
import math
import platform
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from accelerated.data.recall import chances
from accelerated.evaluation.figures import figure_class
from accelerated.lab.speed.timing import time_in_turn
from accelerated.lab.speed.variants import model_on_meta, rollout
from accelerated.lab.systems.speech import read_aloud
from accelerated.lab.tables.notes import draw
from accelerated.lab.tables.page import has_picture, names_and_rows, page
from accelerated.lab.tables.table import TABLES, Table
from accelerated.lab.trials import (
    FIRST_ENDS,
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
from accelerated.program.errors import InputError
from accelerated.program.files import written_whole
from accelerated.protocol import overlap_of
from accelerated.training.checkpoint import load_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.options import parse
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import Settings

ROUNDS = 15  # in which the rows' training steps take turns
SPEECH = Path("runs/speech")
ADVICE = "give another --out"


def measure(name: str, table: Table, workshop: Workshop, pages: Path) -> None:
    """Train, evaluate and time what is missing of a table; write its page and record.

    They are NAME.md and NAME.json in pages, and the picture NAME.svg. Then say which folders hold
    each row's runs, for eval.py.
    """
    if has_picture(table):
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
        "tuned_by": table.tuned_by[1],
        "chances": chances_of(settings_of(one)),
        "seeds": list(SEEDS),
    }
    with written_whole(pages / f"{name}.json", ADVICE) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
    with written_whole(pages / f"{name}.md", ADVICE) as temporary:
        temporary.write_text(page(table, record))
    if has_picture(table):
        draw(table, record, pages / f"{name}.svg")
    for label, row in names_and_rows(record):
        folders = [str(workshop.folder(trial)) for trial in trials[row["name"]]]
        workshop.say(f"{label}: {' '.join(folders)}")


def corpus_of(trial: Trial, workshop: Workshop) -> str:
    """The digest of what a trained trial has read; empty if its documents are generated."""
    path = checkpoint_path(workshop.folder(trial))
    return load_checkpoint(path)["corpus"] if path.exists() else ""


def chances_of(settings: Settings) -> dict[str, float]:
    """{what is known: share of right answers} without a memory; {} if no answers are asked for."""
    return chances(settings.recall) if settings.data.data == "recall" else {}


def measure_again(
    name: str, rows: Sequence[str], seeds: Sequence[int], workshop: Workshop, pages: Path
):
    """Train rows of a published table again, each with its own choice, beside what stands there.

    Nothing is written. The records hold Python's version, whose library `--data stdlib` reads, and
    a digest of the text: another text gives other numbers. Raises InputError if there is no record.
    """
    path = pages / f"{name}.json"
    if not path.exists():
        raise InputError(f"{path} is not there; measure the whole table, without --rows or --seeds")
    record = json.loads(path.read_text())
    table = TABLES[name]
    first = Trial("the first run", table.first)
    if table.first:
        workshop.train([first], FIRST_ENDS)
    begun = str(workshop.folder(first))
    published = {row["name"]: row for row in record["rows"]}
    trials = {}
    for row in rows:
        options = join(table.options, table.rows[row].options, published[row]["choice"])
        options = options.replace("FIRST", begun)
        trials[row] = [Trial(row, options, seed) for seed in seeds]
    workshop.train(trial for of_row in trials.values() for trial in of_row)
    workshop.evaluate(questions(table, trials))

    for row, of_row in trials.items():
        before = published[row]["measured"]
        chosen = {published[row]["choice"]: 0.0}
        again = record_of_row(table, row, chosen, of_row, workshop)["measured"]
        for title, values in again.items():
            seen = f"seeds {seeds}: {values}, in the record {before[title]}"
            workshop.say(f"{row}, {title}, {seen}")
    corpus = corpus_of(trials[rows[0]][0], workshop)
    for what, here in (("python", platform.python_version()), ("corpus", corpus)):
        workshop.say(f"{what}: {here}, in the record {record.get(what, 'not said')}")


def questions(table: Table, trials: dict[str, list[Trial]]) -> Iterator[tuple[Trial, str]]:
    """What eval.py is asked about the trials of a table's rows: (trial, words of eval.py)."""
    for name, of_row in trials.items():
        for each in table.measures:
            for trial in of_row:
                yield trial, each.words(table.rows[name])


def train_rows(
    table: Table, workshop: Workshop
) -> tuple[dict[str, dict[str, float]], dict[str, list[Trial]]]:
    """Tune every row, then train its seeds.

    Returns ({row: {choice: bits per byte on seed 0}}, {row: its trials}).
    """
    first = Trial("the first run", table.first)
    if table.first:
        workshop.train([first], FIRST_ENDS)
    begun = str(workshop.folder(first))

    tried = {}  # {row: {choice: its trial}}
    for name, row in table.rows.items():
        options = join(table.options, row.options).replace("FIRST", begun)
        tried[name] = {choice: Trial(name, join(options, choice)) for choice in table.grid}
    is_tuned = len(table.grid) > 1
    if is_tuned:
        workshop.train(trial for choices in tried.values() for trial in choices.values())

    def tuning_of(choices: dict[str, Trial]) -> dict[str, float]:
        score = LOG_NUMBERS[table.tuned_by[0]]
        return {choice: score(workshop.answer(trial, LOG)) for choice, trial in choices.items()}

    trials = {}
    for name, choices in tried.items():
        choice = best(tuning_of(choices)) if is_tuned else table.grid[0]
        seeds = HEADLINE_SEEDS if name in table.headline else SEEDS
        trials[name] = [choices[choice]._replace(seed=seed) for seed in seeds]
    workshop.train(trial for of_row in trials.values() for trial in of_row)
    return {name: tuning_of(choices) for name, choices in tried.items()}, trials


def best(tuning: dict[str, float]) -> str:
    """The choice with the fewest bits; of a tie the earlier one."""
    return min(tuning, key=lambda choice: tuning[choice])


def record_of_row(
    table: Table, name: str, tuning: dict[str, float], trials: list[Trial], workshop: Workshop
) -> dict:
    """How a row was tuned, and its measures for every seed; None stands for a run that diverged."""
    row = table.rows[name]
    measured = {}
    for each in table.measures:
        measured[each.title] = []
        for trial in trials:
            value = None
            words = each.words(row)
            if workshop.answered(trial, words) and not workshop.diverged(trial):
                value = each.pick(workshop.answer(trial, words))
            measured[each.title].append(value)
    settings = settings_of(trials[0])
    parameters = model_on_meta(settings.model, settings.model_config).parameters()
    return {
        "name": name,
        "paper": row.paper,
        "options": row.options,
        "choice": best(tuning),
        "tuning": {c: None if math.isinf(bits) else bits for c, bits in tuning.items()},
        "parameters": sum(parameter.numel() for parameter in parameters),
        "measured": measured,
        "updates": [workshop.updates(trial) for trial in trials],
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
    tokens = {}
    for row in dict.fromkeys(settings):
        config = row.model_config
        training = row.training
        options = Namespace(batch=training.batch, device=device, dtype=training.dtype)
        model = model_class(row.model)(config).to(device)
        steps[row] = rollout(model, training.backprop, training.horizon, options).step
        new = config.segment - overlap_of(config)
        tokens[row] = training.batch * training.horizon * new
    times = time_in_turn(steps, ROUNDS, device)
    return [[1000 * seconds / tokens[row] for seconds in times[row]] for row in settings]
