"""Processes that run train.py for a test to kill, each at the cost of a fork instead of an import; and how two runs compare."""

import atexit
import multiprocessing
import os
import pkgutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import train as training_script
from accelerated.program.errors import begin_program, run_program
from accelerated.training.checkpoint import load_checkpoint
from accelerated.training.folder import numbered_checkpoints
from accelerated.training.log import read_metrics
from tests.helpers.scripts import equal, saved

PATIENCE = 120.0  # seconds
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.helpers.children", "pytest", "torch._dynamo"])  # imported once, before the forks


def run_script(argv, output, errors, environment, hang):
    """In a child: be train.py with these arguments, files for stdout and stderr, and environment."""
    for path, number in ((output, 1), (errors, 2)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # buffered, as it is for a file, whatever PYTHONUNBUFFERED says
    os.environ.update(environment)
    if hang:
        hang_in(*hang)
    sys.argv = ["train.py", *argv]
    run_program("train.py", training_script.main, *begin_program("train.py", "accelerated.training.options"))


def hang_in(owner, name, call, marker):
    """Make a call of the function owner.name, counted from 1, write the file marker and never return."""
    owner = pkgutil.resolve_name(owner)
    calls, function = [], getattr(owner, name)

    def hanging(*given, **others):
        calls.append(name)
        if len(calls) == call:
            Path(marker).touch()
            time.sleep(PATIENCE)
        return function(*given, **others)

    setattr(owner, name, hanging)


def start(argv, errors, output=None, hang=None, processes=1):
    """Begin train.py in that many processes that train together; stderr and, unless output is given, stdout go to `errors`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    started = []
    for rank in range(processes):
        environment = together | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        given = ([*map(str, argv)], output or errors, errors, environment, hang)
        started.append(SERVER.Process(target=run_script, args=given, daemon=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server, which the first start begins, imports from there
        for process in started:
            process.start()
            atexit.register(process.kill)  # of a test that fails; by itself it would end only if it heard of SIGTERM
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


def hanging(argv, folder, owner, name, call=1):
    """Begin train.py and return its processes as soon as it hangs in that call of owner.name; see hang_in."""
    marker = folder / f"in-{name}"
    started = start(argv, folder / "errors", hang=(owner, name, call, marker))
    deadline = time.monotonic() + PATIENCE
    while not marker.exists():
        assert started[0].is_alive() and time.monotonic() < deadline, (folder / "errors").read_text()
        time.sleep(0.01)
    return started


def measurements(run):
    """The records of a run's metrics.jsonl, without its speed."""
    return [{name: value for name, value in record.items() if name != "tokens_per_second"} for record in read_metrics(run)]


def differences(first, second, besides=()):
    """What two runs differ in: fields of the last checkpoint and of the best one, kept checkpoints, measurements."""
    found = [path for path in ("best.pt",) if (first / path).exists() != (second / path).exists()]
    pairs = [(saved(first), saved(second))]
    if (first / "best.pt").exists() and not found:
        pairs.append((load_checkpoint(first / "best.pt"), load_checkpoint(second / "best.pt")))
    for one, other in pairs:
        found += [key for key in one.keys() | other.keys() if not equal(one.get(key), other.get(key))]
    found += ["step-N.pt"] if list(numbered_checkpoints(first)) != list(numbered_checkpoints(second)) else []
    found += ["metrics.jsonl"] if measurements(first) != measurements(second) else []
    return [name for name in found if name not in besides]
