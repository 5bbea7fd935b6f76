"""How programs end: what a user can mend is one line and exit code 2, an interrupt 130, and a mistake of ours a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from accelerated.program.errors import InputError, begin_program, run_program

ROOT = Path(__file__).parents[3]
OUT_OF_MEMORY = "out of memory; give a smaller --batch or smaller sizes; train.py also takes --accumulate and memory_replay"
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.fixture(autouse=True)
def old_handler():
    """Programs set a handler of SIGINT; put the old one back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


MENDED = {  # what happens: (a function, the line)
    "input": (
        Mock(side_effect=InputError("--data x: no such file;\n give   another")),
        "--data x: no such file; give another",
    ),
    "GPU memory": (
        Mock(side_effect=RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")),
        OUT_OF_MEMORY,
    ),
    "CPU memory": (lambda *_: torch.empty(2**50, dtype=torch.float32), OUT_OF_MEMORY),
    "file": (
        lambda *_: Path("a" * 300).exists(),
        f"cannot use {'a' * 300}: File name too long; give another, or change",
    ),
}


@pytest.mark.parametrize("what", MENDED)
@pytest.mark.parametrize("start", ["begin", "run"])
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(monkeypatch, capsys, what, start):
    main, line = MENDED[what]
    monkeypatch.setitem(sys.modules, "options", SimpleNamespace(parse=main))
    with pytest.raises(SystemExit) as caught:
        begin_program("train.py", "options") if start == "begin" else run_program("train.py", main)
    shown = capsys.readouterr().err
    assert (
        caught.value.code == 2 and shown.startswith(f"train.py: {line}") and shown.count("\n") == 1
    )


def test_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run_program("train.py", Mock(side_effect=RuntimeError("shapes do not fit")))


def program(body, output=None, **environment):
    """(exit code, stdout, stderr) of a Python program; output takes its stdout."""
    body = f"import os, signal, sys\nfrom accelerated.program.errors import *\n{body}"
    command, environment = (
        [sys.executable, "-c", body],
        os.environ | {"PYTHONUNBUFFERED": ""} | environment,
    )
    how = {
        "stdout": output or subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": environment,
        "timeout": 60,
    }
    done = subprocess.run(command, cwd=ROOT, text=True, **how)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_ends_with_one_line_from_the_beginning_to_the_end(tmp_path, moment):
    """While the options are imported, while they are read, after that, and in the main function."""
    at = ["None"] * 4
    at[moment] = INTERRUPT
    (tmp_path / "options.py").write_text(
        f"import os, signal\n{at[0]}\ndef parse(argv):\n    {at[1]}\n    return argv\n"
    )
    body = f"print('before')\nsys.path.append({str(tmp_path)!r})\nbegin_program('eval.py', 'options')\n{at[2]}\n"
    body += f"run_program('eval.py', lambda: {at[3]})\nprint('after')"
    assert program(body) == (130, "before\n", "\neval.py: interrupted\n")


def test_without_torch_a_program_says_what_to_install():
    """Whether it is not found or its import fails, as --resume finds out before the script itself."""
    body = "import types\nsys.modules['some'] = types.SimpleNamespace(parse=tuple)\nsys.argv = ['eval.py']\n"
    said = "eval.py: the package torch is missing; install what eval.py needs: pip install torch==2.13.0 -e .\n"
    assert program(
        f"{body}importlib.util.find_spec = lambda name: None\nbegin_program('eval.py', 'some')"
    ) == (2, "", said)
    assert program(
        f"{body}sys.modules['torch'] = None\nrun_program('eval.py', lambda: __import__('torch'))"
    ) == (2, "", said)


def test_an_interrupt_can_say_how_to_continue_and_waits_for_no_thread():
    body = "import threading, time\nthreading.Thread(target=lambda: time.sleep(600)).start()\n"
    body += (
        "def main(): raise KeyboardInterrupt('the model is saved')\nrun_program('train.py', main)"
    )
    assert program(body) == (130, "", "\ntrain.py: interrupted; the model is saved\n")


def test_a_reader_that_has_gone_is_no_error():
    """As in: python eval.py RUN | head. The output is longer than the buffer, or is written at the end."""
    for size in (10, 100_000):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb") as closed:
            code, _, errors = program(
                f"run_program('eval.py', lambda: print('x' * {size}))", closed
            )
        assert (code, errors) == (1, ""), size


def test_one_of_several_processes_leaves_without_what_may_abort_it(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    body = "import atexit\natexit.register(print, 'ended')\nrun_program('train.py', lambda: print('done'))"
    assert program(body) == (0, "done\nended\n", "") and program(body, WORLD_SIZE="2") == (
        0,
        "done\n",
        "",
    )


def test_what_the_output_cannot_encode_is_escaped():
    """A finished training must not end in a traceback at its sample."""
    body = "run_program('train.py', lambda: print('a sample \u27eb \U0001f600'))"
    assert program(body, PYTHONIOENCODING="ascii") == (0, "a sample \\u27eb \\U0001f600\n", "")
