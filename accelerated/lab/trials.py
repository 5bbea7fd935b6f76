"""Trains and evaluates runs that are missing, several at a time; tables are made of them.

A trial is one run of train.py. Its folder is named after its options: what was trained before is
found again, what was interrupted is resumed, and other options are another trial. What presets and
the corpus say is not in the name.
"""

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.data.sources import fingerprint
from accelerated.program.errors import InputError
from accelerated.training.folder import Log, checkpoint_path, read_metrics

ROOT = Path(__file__).parents[2]  # of train.py and eval.py
DIVERGED = "try a lower --learning-rate"  # ends train.py's line when a loss is NaN or infinite


class Trial(NamedTuple):
    """One run: the options of train.py that a row and its grid give, and a seed."""

    name: str  # of its row
    options: str
    seed: int = 0

    @property
    def words(self) -> list[str]:
        """All options as train.py gets them, without --out."""
        return shlex.split(f"{self.options} --seed {self.seed} --sample 0")


class Workshop:
    """Trains and evaluates trials in the folder `runs`, `jobs` at a time; `say` prints a line."""

    def __init__(self, runs: Path, jobs: int, say: Callable = print):
        self.runs = runs
        self.jobs = jobs
        self.say = say
        self.threads = max(1, (os.cpu_count() or 1) // jobs)  # of a run

    def folder(self, trial: Trial) -> Path:
        """The folder of a trial's run.

        Rows of any table with the same options share it, in whatever order they stand.
        """
        options = sorted(settled(trial.options).items())
        return self.runs / f"{fingerprint(options)}-seed-{trial.seed}"

    def log(self, trial: Trial) -> list[dict]:
        """The records of a trial's log, as far as it was trained."""
        return read_metrics(self.folder(trial))

    def train(self, trials: Iterable[Trial]) -> None:
        """Train the trials that are missing, and resume those that were interrupted.

        Raises InputError if one cannot run.
        """
        by_folder = {self.folder(trial): trial for trial in trials}
        missing = [trial for trial in by_folder.values() if not final(self.log(trial))]
        self.in_parallel(self.train_one, missing)

    def train_one(self, trial: Trial) -> str:
        """Train or resume one trial; returns a line about it.

        A run that diverged counts as finished.
        """
        folder = self.folder(trial)
        words = [*trial.words, "--out", str(folder)]
        if checkpoint_path(folder).exists():
            words = ["--resume", str(folder)]
        code, _, last = self.run([sys.executable, str(ROOT / "train.py"), *words])
        if code == 2 and last.endswith(DIVERGED):
            folder.mkdir(parents=True, exist_ok=True)
            Log(folder).write(step=0, final=True, diverged=last)  # pyright: ignore
        elif code:
            raise InputError(f"{shlex.join(['train.py', *words])} ended with code {code}: {last}")
        records = self.log(trial)
        if not final(records):
            raise InputError(
                f"{folder} was stopped before its end; give the same command again to continue it"
            )
        reached = f"{validation(records):.4f} bits per byte"
        return f"{trial.name} {trial.options} --seed {trial.seed}: {reached}"

    def evaluate(self, questions: Iterable[tuple[Trial, str]]) -> dict[tuple[Trial, str], Any]:
        """{question: the JSON that eval.py answers} of questions (trial, words)."""
        different = list(dict.fromkeys(questions))
        answers = {}

        def ask(question: tuple[Trial, str]) -> str:
            trial, words = question
            report, *options = shlex.split(words)
            folder = str(self.folder(trial))
            command = [str(ROOT / "eval.py"), report, folder, *options, "--json"]
            code, output, last = self.run([sys.executable, *command])
            if code:
                raise InputError(f"{shlex.join(command)} ended with code {code}: {last}")
            answers[question] = json.loads(output)
            return f"{trial.name}, seed {trial.seed}: eval.py {words}"

        self.in_parallel(ask, different)
        return answers

    def run(self, command: Sequence[str]) -> tuple[int, str, str]:
        """(exit code, stdout, last line said) of a program."""
        own = {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
        said = ended.stderr.strip() or ended.stdout.strip() or "no output"
        return ended.returncode, ended.stdout, said.splitlines()[-1]

    def in_parallel(self, function: Callable[[Any], str], each: Sequence) -> None:
        """Call a function of each, `jobs` at a time; say the line that it returns.

        After the first error, or Ctrl-C, no other call begins. A terminal sends Ctrl-C to the
        programs too: train.py saves, and is resumed next time.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                futures = [pool.submit(function, one) for one in each]
                for done, future in enumerate(as_completed(futures), start=1):
                    self.say(f"[{done}/{len(each)}] {future.result()}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def settled(options: str) -> dict[str, list[str]]:
    """{name: values} of options.

    Of several with the same name the last one counts, as for train.py.
    """
    values_of = {}
    name = ""
    for word in shlex.split(options):
        if word.startswith("--"):
            name = word
            values_of[name] = []
        else:
            values_of[name].append(word)
    return values_of


def join(*options: str) -> str:
    """Options, one after another."""
    return " ".join(filter(None, options))


def final(records: list[dict]) -> dict:
    """The last report of a run's log, empty if it is missing."""
    return next((record for record in reversed(records) if record.get("final")), {})


def validation(records: list[dict]) -> float:
    """The validation of the last report, infinite if the run diverged or is missing."""
    return final(records).get("validation_bits_per_byte", math.inf)
