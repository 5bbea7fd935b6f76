"""How programs end: what a user can mend is one line and exit code 2, an interrupt 130.

A mistake of ours is a traceback.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from accelerated.program.errors import InputError, begin_program, run_program
from tests.conftest import ROOT

OUT_OF_MEMORY = (
    "out of memory; give a smaller --batch or smaller sizes; "
    "train.py also takes --accumulate and memory_replay"
)
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


INPUT = InputError("--data x: no such file;\n give   another")
GPU = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
LONG = "a" * 300
MENDED = {  # what happens: (a function, the line)
    "input": (Mock(side_effect=INPUT), "--data x: no such file; give another"),
    "GPU memory": (Mock(side_effect=GPU), OUT_OF_MEMORY),
    "CPU memory": (lambda *_: torch.empty(2**50, dtype=torch.float32), OUT_OF_MEMORY),
    "file": (
        lambda *_: Path(LONG).exists(),
        f"cannot use {LONG}: File name too long; give another",
    ),
    "permissions": (
        Mock(side_effect=PermissionError(13, "Permission denied", "x.txt")),
        "cannot use x.txt: Permission denied; give another",
    ),
}


@pytest.mark.parametrize("what", MENDED)
@pytest.mark.parametrize("start", ["begin", "run"])
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(monkeypatch, capsys, what, start):
    main, line = MENDED[what]
    monkeypatch.setitem(sys.modules, "options", SimpleNamespace(parse=main))
    with pytest.raises(SystemExit) as caught:
        if start == "begin":
            begin_program("train.py", "options")
        else:
            run_program("train.py", main)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"train.py: {line}")
    assert shown.count("\n") == 1


def test_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run_program("train.py", Mock(side_effect=RuntimeError("shapes do not fit")))


def program(*lines, output=None, **environment):
    """(exit code, stdout, stderr) of a Python program of these lines; output takes its stdout."""
    imports = "import os, signal, sys\nfrom accelerated.program.errors import *"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([imports, *lines])],
        stdout=output or subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""} | environment,
        cwd=ROOT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("moment", ["importing options", "reading them", "between", "in main"])
def test_an_interrupt_ends_with_one_line_from_the_beginning_to_the_end(tmp_path, moment):
    def at(name):
        return INTERRUPT if name == moment else "None"

    (tmp_path / "options.py").write_text(
        f"import os, signal\n{at('importing options')}\n"
        f"def parse(argv):\n    {at('reading them')}\n    return argv\n"
    )
    found = program(
        "print('before')",
        f"sys.path.append({str(tmp_path)!r})",
        "begin_program('eval.py', 'options')",
        at("between"),
        f"run_program('eval.py', lambda: {at('in main')})",
        "print('after')",
    )
    assert found == (130, "before\n", "\neval.py: interrupted\n")


def test_an_interrupt_can_say_how_to_continue_and_waits_for_no_thread():
    found = program(
        "import threading, time",
        "threading.Thread(target=lambda: time.sleep(600)).start()",
        "def main(): raise KeyboardInterrupt('the model is saved')",
        "run_program('train.py', main)",
    )
    assert found == (130, "", "\ntrain.py: interrupted; the model is saved\n")


@pytest.mark.parametrize("size", [10, 100_000])  # or longer than the buffer
def test_a_reader_that_has_gone_is_no_error(size):
    """As in: python eval.py RUN | head."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        line = f"run_program('eval.py', lambda: print('x' * {size}), heard=True)"
        code, _, errors = program(line, output=closed)
    assert (code, errors) == (1, "")


WORK = """
from accelerated.program.progress import Progress

def main():
    for number in Progress("working", 2000, over=range(2000)):
        Progress.say(f"line {number}")
    print("a warning", file=sys.stderr)
    open("done", "w").close()

run_program("train.py", main)
"""
# What a shell does with the outputs
OUTPUTS = ["| true", "2>&1 | true", "2>/dev/full", ">/dev/full"]


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_program_works_although_nobody_listens(tmp_path, outputs, buffered):
    code = f"import os, sys\nfrom accelerated.program.errors import run_program\n{WORK}"
    line = f'"{sys.executable}" -c "$CODE" {outputs}; exit ${{PIPESTATUS[0]}}'
    path = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": buffered, "CODE": code}
    run = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=os.environ | path, timeout=60)
    assert run.returncode == 0
    assert (tmp_path / "done").exists(), "it ended before its work"


def test_one_of_several_processes_leaves_without_what_may_abort_it(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    lines = [
        "import atexit",
        "atexit.register(print, 'ended')",
        "run_program('train.py', lambda: print('done'))",
    ]
    assert program(*lines) == (0, "done\nended\n", "")
    assert program(*lines, WORLD_SIZE="2") == (0, "done\n", "")


def test_what_the_output_cannot_encode_is_escaped():
    """A finished training must not end in a traceback at its sample."""
    line = "run_program('train.py', lambda: print('a sample \u27eb \U0001f600'))"
    expected = "a sample \\u27eb \\U0001f600\n"
    assert program(line, PYTHONIOENCODING="ascii") == (0, expected, "")
