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
from threading import Lock
from typing import Any, NamedTuple

from accelerated.data.sources import fingerprint
from accelerated.program.errors import InputError
from accelerated.program.files import written_whole
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
        self.lock = Lock()  # no program begins while the others are stopped
        self.stopping = False
        self.programs: list[subprocess.Popen] = []

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
        self.in_parallel([(self.train_one, trial) for trial in missing])

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

    def evaluate(self, questions: Iterable[tuple[Trial, str]]) -> None:
        """Have eval.py answer the questions (trial, words) that it has not answered before."""
        missing = {}
        for trial, words in questions:
            file = self.answer_file(trial, words)
            if not file.exists():
                missing[file] = (self.evaluate_one, trial, words)
        self.in_parallel(list(missing.values()))

    def evaluate_one(self, trial: Trial, words: str) -> str:
        """Run one report of eval.py on a trial and keep its JSON; returns a line about it."""
        report, *options = shlex.split(words)
        folder = str(self.folder(trial))
        command = [str(ROOT / "eval.py"), report, folder, *options, "--json"]
        code, output, last = self.run([sys.executable, *command])
        if code:
            raise InputError(f"{shlex.join(command)} ended with code {code}: {last}")
        with written_whole(self.answer_file(trial, words), "give another --runs") as path:
            path.write_text(output, encoding="utf-8")
        return f"{trial.name}, seed {trial.seed}: eval.py {words}"

    def answer_file(self, trial: Trial, words: str) -> Path:
        """Where the answer of eval.py is kept: in the run's folder, to be deleted with it."""
        return self.folder(trial) / f"eval-{fingerprint(words)}.json"

    def answer(self, trial: Trial, words: str) -> Any:
        """The JSON that eval.py answered."""
        return json.loads(self.answer_file(trial, words).read_text(encoding="utf-8"))

    def run(self, command: Sequence[str]) -> tuple[int, str, str]:
        """(exit code, stdout, last line said) of a program.

        It has a session of its own: Ctrl-C reaches it once, by this process.
        """
        own = {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.lock:
            if self.stopping:
                return 1, "", ""
            program = subprocess.Popen(
                command, env=os.environ | own, start_new_session=True, **pipes
            )
            self.programs.append(program)
        output, errors = program.communicate()
        said = errors.strip() or output.strip() or "no output"
        return program.returncode, output, said.splitlines()[-1]

    def in_parallel(self, calls: list[tuple]) -> None:
        """Make the calls (function, *arguments), `jobs` at a time; say the line that each returns.

        The first error, or Ctrl-C, stops the programs that still run: train.py saves, and is
        resumed next time. Results and errors of the other calls are then ignored.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                futures = [pool.submit(*call) for call in calls]
                for done, future in enumerate(as_completed(futures), start=1):
                    self.say(f"[{done}/{len(calls)}] {future.result()}")
            except BaseException:
                with self.lock:
                    self.stopping = True
                for program in self.programs:
                    program.terminate()  # once: train.py saves
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
