"""train.py and eval.py as a user calls them, here or in a process to be killed.

Beside them a workshop that trains nothing.
"""

import contextlib
import io
import itertools
import json
import math
import multiprocessing
import os
import pkgutil
import shlex
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_flatten

import eval as evaluation_script
import train as training_script
from accelerated.evaluation.options import parse
from accelerated.lab.tables.table import Measure, Row, Table
from accelerated.lab.trials import Workshop
from accelerated.program.errors import InputError, begin_program, run_program
from accelerated.training.checkpoint import FIELDS, load_checkpoint
from accelerated.training.folder import checkpoint_path, read_metrics
from accelerated.training.options import parse as parse_training

ROOT = Path(__file__).parents[2]


def words(*given):
    """The words of a command line: a text is split as a shell does, anything else is one word."""
    found = []
    for each in given:
        found += shlex.split(each) if isinstance(each, str) else [str(each)]
    return found


# The whole validation split is read once, at the end
LITTLE = "--width 16 --heads 2 --feed-forward 32 --warmup 2 --batch 3 --validation-tokens 0"
LITTLE += " --validate-every 0"
BLOCKS = "--head-width 8 --window 8 --segment 16 --states 4 --recurrent-layers 2 --layers 2"
ROWS = "--head-width 8 --segment 8 --memory 8 --compressed-memory 4 --compression-rate 2 --layers 2"
SLOTS = "--head-width 8 --segment 8 --encoder-layers 1 --decoder-layers 1 --slots 3 --horizon 3"
KEYS = "--head-width 8 --segment 8 --memory-layer 2 --memory 24 --retrieved 3 --layers 2"
WINDOWS = "--segment 8 --max-positions 12 --horizon 3 --layers 2"
TINY = words(LITTLE, BLOCKS, "--sample 5")
COMPRESSIVE = words("--model compressive --sample 0", LITTLE, ROWS)
MEMFORMER = words("--model memformer --sample 0", LITTLE, SLOTS)
MEMORIZING = words("--model memorizing --sample 0", LITTLE, KEYS)
WINDOWED = words("--model pretrained_recurrence --sample 0", LITTLE, WINDOWS)
OVERLAPPING = words(*WINDOWED, "--overlap 2")
PLAIN = words(*WINDOWED, "--vectors 0")
BRIEF = words("--sample 0 --validation-tokens 48 --steps 2")


def train(*argv):
    """Run train.py with these arguments."""
    training_script.main(*parse_training(words(*argv)))


def evaluate(*argv):
    """Run eval.py with these arguments."""
    evaluation_script.main(*parse(words(*argv)))


def refusal(call, *arguments):
    """The one line with which a call is refused.

    It is an InputError's, or a system's error's, which a program turns into such a line; or it is
    what is printed before exit code 2.
    """
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            code = call(*arguments)
        except (InputError, OSError) as error:
            assert "\n" not in str(error)
            return str(error)
        except SystemExit as end:
            code = end.code
    assert type(code) is int and code == 2, f"nothing refuses {arguments}"
    line = printed.getvalue().removesuffix("\n")
    assert "\n" not in line
    return line


def saved(run):
    """The contents of a run's last checkpoint."""
    return load_checkpoint(checkpoint_path(run))


def equal(first, second):
    """Whether two saved values are the same to the bit."""
    leaves, form = tree_flatten(first)
    others, other_form = tree_flatten(second)
    if form != other_form:
        return False
    for one, other in zip(leaves, others, strict=True):
        is_tensor = isinstance(one, torch.Tensor)
        if not (torch.equal(one, other) if is_tensor else one == other):
            return False
    return True


def train_each(folder, options, **kinds):
    """Runs of two steps below a folder, {name: its folder} of kinds {name: options of its own}."""
    runs = {name: folder / name for name in kinds}
    for name, run in runs.items():
        train(*kinds[name], options, *BRIEF, "--out", run)
    return runs


def write_texts(folder):
    """Write 80 short texts into a new folder, and return it."""
    folder.mkdir()
    for number in range(80):
        text = f"text number {number} of some. " * (number % 7 + 1)
        (folder / f"{number}.txt").write_text(text)
    return folder


def trained_runs(folder):
    """A run of each model, trained for two steps on one text; and a folder of short texts."""
    book = folder / "book.txt"
    content = (ROOT / "reference" / "block_recurrent.py").read_text("utf-8")
    pieces = [content[at : at + 100] for at in range(0, 14_000, 100)]
    book.write_text(" some common words ".join(pieces), "utf-8")
    runs = train_each(
        folder,
        f"--data {book}",
        recurrent=TINY,
        compressive=COMPRESSIVE,
        memformer=MEMFORMER,
        memorizing=MEMORIZING,
        windowed=OVERLAPPING,
        plain=PLAIN,
    )
    return SimpleNamespace(book=book, texts=write_texts(folder / "texts"), **runs)


def joined_runs(folder):
    """Runs that were trained with memory carried over documents."""
    texts = write_texts(folder / "texts")
    options = f"--data {texts} --carry-over-documents"
    kinds = {"compressive": COMPRESSIVE, "windowed": OVERLAPPING, "plain": PLAIN}
    return SimpleNamespace(**train_each(folder, options, **kinds))


def printed(capsys, *argv):
    capsys.readouterr()
    evaluate(*argv)
    return capsys.readouterr().out


def as_json(capsys, *argv):
    [line] = printed(capsys, *argv, "--json").splitlines()
    return json.loads(line)


PATIENCE = 120.0  # seconds
SERVER = multiprocessing.get_context("forkserver")
# Imported once, before the forks
SERVER.set_forkserver_preload(["tests.helpers.programs", "pytest", "torch._dynamo"])


def end_with_parent():
    """In a child: end as soon as the tests do, even if they are killed."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def run_script(argv, output, environment, hang):
    """In a child: be train.py with these arguments and environment; all goes to a file."""
    end_with_parent()
    with open(output, "ab") as file:
        for number in (1, 2):  # stdout and stderr
            os.dup2(file.fileno(), number)
    # Buffered, as it is for a file, whatever PYTHONUNBUFFERED says
    sys.stdout = os.fdopen(1, "w", closefd=False)
    os.environ.update(environment)
    if hang:
        hang_in(*hang)
    sys.argv = ["train.py", *argv]
    given = begin_program("train.py", "accelerated.training.options")
    run_program("train.py", training_script.main, *given)


def hang_in(owner, name, call, marker):
    """Make a call of the function owner.name write the file marker and never return.

    `call` is its number, from 1, or the end of its last argument: of os.replace, a file's name.
    """
    owner = pkgutil.resolve_name(owner)
    function = getattr(owner, name)
    calls = []

    def hanging(*given, **others):
        calls.append(name)
        is_named = isinstance(call, str) and str(given[-1]).endswith(call)
        if is_named or len(calls) == call:
            Path(marker).touch()
            time.sleep(PATIENCE)
        return function(*given, **others)

    setattr(owner, name, hanging)


def start(argv, output, hang=None, processes=1):
    """Begin train.py in that many processes that train together.

    stdout and stderr go to the file `output`.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    started = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = together | own if processes > 1 else {}
        given = (words(*argv), output, environment, hang)
        started.append(SERVER.Process(target=run_script, args=given, daemon=True))
    with pytest.MonkeyPatch.context() as patch:
        # The server, which the first start begins, imports from there
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        for process in started:
            process.start()
    return started


def ended(started):
    """Wait for processes to end; returns their exit codes."""
    for process in started:
        process.join(PATIENCE)
    return [process.exitcode for process in started]


def killed(started):
    """End processes by SIGKILL; returns whether one of them was still at work."""
    for process in started:
        process.kill()
    return -signal.SIGKILL in ended(started)


def hanging(argv, folder, owner, name, call):
    """Begin train.py; returns its processes as soon as it hangs, as hang_in says."""
    marker = folder / f"in-{name}"
    started = start(argv, folder / "errors", hang=(owner, name, call, marker))
    wait_for(marker, started, folder / "errors")
    return started


def wait_for(path, started, errors):
    """Wait until processes that were started have written path."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert started[0].is_alive() and time.monotonic() < deadline, errors.read_text()
        time.sleep(0.01)


def measurements(run):
    """The records of a run's metrics.jsonl, without its speed."""
    records = read_metrics(run)
    for record in records:
        record.pop("tokens_per_second", None)
    return records


def differences(first, second, with_log=True):
    """What two runs differ in: fields of the last checkpoint and of the best, the first record."""
    found = []
    for file in ("checkpoint.pt", "best.pt"):
        paths = (first / file, second / file)
        one, other = (load_checkpoint(path) if path.exists() else {} for path in paths)
        names = one.keys() | other.keys()
        found += [name for name in names if not equal(one.get(name), other.get(name))]
    if not with_log:
        return found
    records = itertools.zip_longest(measurements(first), measurements(second))
    unequal = (f"metrics.jsonl has {one} and {other}" for one, other in records if one != other)
    return [*found, *itertools.islice(unequal, 1)]


EMPTY_CHECKPOINT = {name: {} for name in FIELDS} | {
    "model": "compressive",
    "step": 1,
    "corpus": "",
    "tokenizer": "",
    "state": (),
    "random": torch.zeros(1),
    "best": math.inf,
    "gradient_norm": math.nan,
    "pending": (0.0, 0, 0, False),
}


class Rehearsal(Workshop):
    """A workshop whose train.py and eval.py only note their arguments.

    loss: {part of the options: bits that training reaches}; 1 for all others
    fails: {part of the options: the line with which it fails}
    """

    def __init__(self, runs, loss=(), fails=()):
        self.said = []
        self.calls = []
        self.loss = dict(loss)
        self.fails = dict(fails)
        super().__init__(runs, 1, say=self.said.append)

    def run(self, command):
        words = [str(word) for word in command[1:]]
        self.calls.append(words)
        text = " ".join(words)
        for part, line in self.fails.items():
            if part in text:
                return 2, "some progress\n", line
        if words[0].endswith("eval.py"):
            return 0, json.dumps({"asked": words[1:]}), "a warning"
        named = "--out" if "--out" in words else "--resume"
        folder = Path(words[words.index(named) + 1])
        folder.mkdir(parents=True, exist_ok=True)
        reached = [loss for part, loss in self.loss.items() if part in text]
        bits = reached[0] if reached else 1.0
        first = {"step": 1, "loss": 3.0, "bits_per_byte": -bits}
        last = {"step": 5, "final": True, "validation_bits_per_byte": bits}
        (folder / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
        (folder / "checkpoint.pt").touch()
        return 0, "trained\n", "trained"


CARRIED = Measure("test, bits per byte", "score --split test", "bits_per_byte")
TWO = Table(
    title="A paper, Table 9",
    about="What is it about? " * 20,
    answer="It is about this.",
    change="",
    takes="an hour",
    page="",
    beside="",
    python="",
    options="--width 8",
    rows={"a": Row("--x 1", "1.5"), "b": Row("--x 2", "2.5")},
    measures=[CARRIED],
    orderings=["a < b", "b - a < a"],
    headline=[],
    grid=["--rate 1", "--rate 2"],
    first="",
)


def record_of(**measured):
    """A record of TWO with given measures {row: [values by seed]} of its first measure."""
    common = {"choice": "--rate 1", "tuning": {"--rate 1": 2.0}, "parameters": 1234}
    seconds = [[0.5, 0.5, 0.5], [1.5, 2.5, 2.0]]
    rows = []
    for (name, row), step_seconds in zip(TWO.rows.items(), seconds, strict=True):
        of_row = {"name": name} | row._asdict() | common | {"step_seconds": step_seconds}
        if name in measured:
            own = measured[name]
            by_title = {TWO.measures[0].title: own}
            rows.append(of_row | {"seeds": [*range(len(own))], "measured": by_title})
    return {
        "name": "a-table",
        "date": "2026-01-02",
        "python": "3.11.7",
        "machine": "2 cores",
        "torch": "2.13.0",
        "rows": rows,
        "options": "--width 8",
        "first": "",
        "grid": ["--rate 1", "--rate 2"],
    }
