"""Trains and evaluates the runs of an experiment that are missing, several at a time; every table and the recall family use it.

A trial is one run of train.py. Its folder is named after the options that its table gives it: what was trained before is found
again, what was interrupted is resumed, and other options are another trial. What presets and the corpus say is not in the name.
"""

import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from accelerated.data.corpus import fingerprint
from accelerated.program.errors import InputError
from accelerated.program.files import disk_errors, written_whole
from accelerated.training.folder import METRICS, checkpoint_path
from accelerated.training.log import read_metrics

ROOT = Path(__file__).parents[2]  # of train.py and eval.py
OUTPUT = "output.txt"  # in a trial's folder: what train.py printed last
DIVERGED = "try a lower --learning-rate"  # ends train.py's line when a loss is NaN or infinite
SAVED_ONCE = "--keep 1 --sample 0"  # a trial needs its last checkpoint alone
SEEDS = (0, 1, 2)
LOG = ""  # instead of words of eval.py: the records of a run's own log
ADVICE = "give another --runs"


class Trial(NamedTuple):
    """One run: the options of train.py that a row and its grid give, and a seed."""

    name: str  # of its row
    options: str
    seed: int = 0

    @property
    def words(self) -> list[str]:
        """All options as train.py gets them, without --out."""
        own = [word for name, values in settled(self.options).items() for word in (name, *values)]
        return [*own, "--seed", str(self.seed), *shlex.split(SAVED_ONCE)]


class Workshop:
    """Trains and evaluates trials in the folder `runs`, `jobs` at a time; `say` prints a line."""

    def __init__(self, runs: Path, jobs: int, say: Callable = print):
        self.runs, self.jobs, self.say = runs, jobs, say
        self.children, self.stopping = set(), False
        threads = max(1, (os.cpu_count() or 1) // jobs)
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}

    def folder(self, trial: Trial) -> Path:
        """The folder of a trial's run; rows of any table with the same options share it, in whatever order they stand."""
        return self.runs / f"{fingerprint(sorted(settled(trial.options).items()))}-seed-{trial.seed}"

    def train(self, trials: Iterable[Trial]) -> None:
        """Train the trials that are missing, and resume those that were interrupted; raises InputError if one cannot run."""
        missing = [
            trial for trial in {self.folder(trial): trial for trial in trials}.values() if last_report(self.folder(trial)) is None
        ]
        self.in_parallel([(self.train_one, trial) for trial in missing])

    def train_one(self, trial: Trial) -> str:
        """Train or resume one trial; returns a line about it. A run that diverged counts as finished."""
        folder, begun = self.folder(trial), time.monotonic()
        begin = ["--resume", str(folder)] if checkpoint_path(folder).exists() else [*trial.words, "--out", str(folder)]
        code, output = self.run([sys.executable, str(ROOT / "train.py"), *begin])
        if self.stopping:
            return f"{trial.name}: stopped"
        last = last_line(output)
        diverged = code == 2 and last.endswith(DIVERGED)
        if code and not diverged:
            raise InputError(f"{shlex.join(['train.py', *begin])} ended with code {code}: {last}")
        with disk_errors(folder, ADVICE):
            folder.mkdir(parents=True, exist_ok=True)
            if diverged:
                with open(folder / METRICS, "a") as file:
                    file.write(json.dumps({"step": 0, "final": True, "diverged": last}) + "\n")
            (folder / OUTPUT).write_text(output)
        if last_report(folder) is None:
            raise InputError(f"{folder} was stopped before its end; give the same command again to continue it")
        spent = time.monotonic() - begun
        return f"{trial.name} {trial.options} --seed {trial.seed}: {bits_of(folder):.4f} bits per byte, {spent:.0f} s"

    def diverged(self, trial: Trial) -> bool:
        """Whether a trial's loss became NaN or infinite; it has nothing to evaluate."""
        return math.isinf(bits_of(self.folder(trial)))

    def evaluate(self, questions: Iterable[tuple[Trial, str]]) -> None:
        """Have eval.py answer the questions (trial, words of eval.py) that it has not answered before."""
        asked = {self.answer_file(trial, words): (trial, words) for trial, words in questions if words != LOG}
        missing = [pair for file, pair in asked.items() if not (file.exists() or self.diverged(pair[0]))]
        self.in_parallel([(self.evaluate_one, *pair) for pair in missing])

    def evaluate_one(self, trial: Trial, words: str) -> str:
        """Run one report of eval.py on a trial and keep its JSON; returns a line about it."""
        report, *options = shlex.split(words)
        command = [sys.executable, str(ROOT / "eval.py"), report, str(self.folder(trial)), *options, "--json"]
        code, output = self.run(command, errors=False)
        if self.stopping:
            return f"{trial.name}: stopped"
        if code:
            raise InputError(f"{shlex.join(command[1:])} ended with code {code}: {last_line(output)}")
        with written_whole(self.answer_file(trial, words), ADVICE) as path:
            path.write_text(output)
        return f"{trial.name}, seed {trial.seed}: eval.py {words}"

    def answer_file(self, trial: Trial, words: str) -> Path:
        """Where the answer of eval.py is kept: in the run's folder, so that it is deleted with it."""
        return self.folder(trial) / f"eval-{fingerprint(words)}.json"

    def answer(self, trial: Trial, words: str) -> dict:
        """The JSON that eval.py answered; of LOG {"records": those of the run's log}."""
        if words == LOG:
            return {"records": read_metrics(self.folder(trial))}
        return json.loads(self.answer_file(trial, words).read_text())

    def run(self, command: Sequence[str], errors: bool = True) -> tuple[int, str]:
        """(exit code, output) of a program in a session of its own: Ctrl-C reaches it once, by way of this process.

        What it says on stderr is part of the output, unless `errors` is false and it succeeds.
        """
        if self.stopping:
            return 1, ""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if errors else subprocess.PIPE}
        with subprocess.Popen(command, text=True, env=self.environment, start_new_session=True, **pipes) as child:
            self.children.add(child)
            if self.stopping:  # since it was asked above
                child.send_signal(signal.SIGINT)
            try:
                output, said = child.communicate()
            finally:
                self.children.discard(child)
        return child.returncode, output + (said or "") if child.returncode else output

    def in_parallel(self, calls: list[tuple]) -> None:
        """Make the calls (function, *arguments), `jobs` at a time, and say the line that each returns.

        The first error, or Ctrl-C, stops the programs that still run: train.py saves, and is resumed next time.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            waiting, done = {pool.submit(*call) for call in calls}, 0
            try:
                while waiting:
                    ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in ended:
                        done += 1
                        self.say(f"[{done}/{len(calls)}] {future.result()}")
            except BaseException:
                self.stopping = True
                for child in tuple(self.children):
                    child.send_signal(signal.SIGINT)
                raise


def product(*grids: Sequence[str]) -> tuple[str, ...]:
    """Every choice of options that takes one from each grid."""
    return tuple(map(" ".join, itertools.product(*grids)))


def settled(options: str) -> dict[str, list[str]]:
    """{name: values} of options; of several with the same name the last one counts, as for train.py."""
    found, name = {}, ""
    for word in shlex.split(options):
        if word.startswith("--"):
            name, found[word] = word, []
        else:
            found[name].append(word)
    return found


def last_report(folder: Path) -> dict | None:
    """The record of a run's last report in its metrics, None if it has not ended."""
    return next((record for record in reversed(read_metrics(folder)) if record.get("final")), None)


def last_validation(records: list[dict]) -> float:
    """The last validation of a run's log in bits per byte, infinite if it diverged; only trained runs have one."""
    return next(record for record in reversed(records) if record.get("final")).get("validation_bits_per_byte", math.inf)


def bits_of(folder: Path) -> float:
    """The last validation of a trained run."""
    return last_validation(read_metrics(folder))


def tuned(
    workshop: Workshop, rows: dict[str, str], grid: Sequence[str], score: Callable[[list[dict]], float] = last_validation
) -> dict[str, tuple[str, dict[str, float]]]:
    """{row: (its best choice, {choice: bits per byte on seed 0})} of rows {name: options}, each with every choice of the grid.

    The score of a run's log decides; a tie goes to the earlier choice.
    """
    trials = {(name, choice): Trial(name, join(options, choice)) for name, options in rows.items() for choice in grid}
    workshop.train(trials.values())
    found = {}
    for name in rows:
        bits = {choice: score(read_metrics(workshop.folder(trials[name, choice]))) for choice in grid}
        found[name] = min(bits, key=bits.get), bits
    return found


def last_line(output: str) -> str:
    """The last line of a program's output."""
    return (output.strip().splitlines() or ["no output"])[-1]


def join(*options: str) -> str:
    """Options, one after another."""
    return " ".join(filter(None, options))
