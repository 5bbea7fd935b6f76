"""How programs end: what a user can mend is one line and exit code 2, an interrupt 130, and a mistake of ours a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accelerated.program.errors import InputError, begin_program, run_program

ROOT = Path(__file__).parents[3]
OUT_OF_MEMORY = "out of memory; give a smaller --batch or smaller sizes; train.py also takes --accumulate and memory_replay"
FULL = "eval.py: cannot write the output: No space left on device; send it elsewhere\n"
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.fixture(autouse=True)
def old_handler():
    """Programs set a handler of SIGINT; put the old one back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def failing(error):
    """A function that raises the error, whatever it is given."""

    def fail(*given):
        raise error

    return fail


MENDED = {  # what happens: the line
    failing(InputError("--data x: no such file;\n give   another")): "--data x: no such file; give another",
    failing(MemoryError()): OUT_OF_MEMORY,
    failing(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")): OUT_OF_MEMORY,
    lambda *_: torch.empty(2**50, dtype=torch.float32): OUT_OF_MEMORY,
    lambda *_: Path("a" * 300).exists(): f"cannot use {'a' * 300}: File name too long; give another, or change its permissions",
}


@pytest.mark.parametrize("main", MENDED, ids=["input", "memory", "GPU memory", "CPU memory", "file"])
@pytest.mark.parametrize("start", ["begin", "run"])
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(monkeypatch, capsys, main, start):
    monkeypatch.setitem(sys.modules, "options", SimpleNamespace(parse=main))
    with pytest.raises(SystemExit) as caught:
        begin_program("train.py", "options") if start == "begin" else run_program("train.py", main)
    assert caught.value.code == 2 and capsys.readouterr().err == f"train.py: {MENDED[main]}\n"


def test_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run_program("train.py", failing(RuntimeError("shapes do not fit")))


def program(body, output=None, **environment):
    """(exit code, stdout, stderr) of a Python program; output takes its stdout."""
    body = f"import os, signal, sys\nfrom accelerated.program.errors import *\n{body}"
    command, environment = [sys.executable, "-c", body], os.environ | {"PYTHONUNBUFFERED": ""} | environment
    how = {"stdout": output or subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, "timeout": 60}
    done = subprocess.run(command, cwd=ROOT, text=True, **how)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_ends_with_one_line_from_the_beginning_to_the_end(tmp_path, moment):
    """While the options are imported, while they are read, after that, and in the main function."""
    at = ["None"] * 4
    at[moment] = INTERRUPT
    (tmp_path / "options.py").write_text(f"import os, signal\n{at[0]}\ndef parse(argv):\n    {at[1]}\n    return argv\n")
    body = f"print('before')\nsys.path.append({str(tmp_path)!r})\nbegin_program('eval.py', 'options')\n{at[2]}\n"
    body += f"run_program('eval.py', lambda: {at[3]})\nprint('after')"
    assert program(body) == (130, "before\n", "\neval.py: interrupted\n")


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_without_torch_a_program_says_what_to_install(script):
    """Whether it is not found or its import fails, as --resume finds out before the script itself."""
    body = f"import types\nsys.modules['some'] = types.SimpleNamespace(parse=tuple)\nsys.argv = ['{script}']\n"
    said = f"{script}: the package torch is missing; install what {script} needs: pip install torch==2.13.0 -e .\n"
    assert program(f"{body}importlib.util.find_spec = lambda name: None\nbegin_program('{script}', 'some')") == (2, "", said)
    assert program(f"{body}sys.modules['torch'] = None\nrun_program('{script}', lambda: __import__('torch'))") == (2, "", said)


def test_an_interrupt_can_say_how_to_continue_and_waits_for_no_thread():
    body = "import threading, time\nthreading.Thread(target=lambda: time.sleep(600)).start()\n"
    body += "def main(): raise KeyboardInterrupt('the model is saved')\nrun_program('train.py', main)"
    assert program(body) == (130, "", "\ntrain.py: interrupted; the model is saved\n")


def test_a_reader_that_has_gone_is_no_error():
    """As in: python eval.py RUN | head. The output is longer than the buffer, or is written at the end."""
    for size in (10, 100_000):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb") as closed:
            code, _, errors = program(f"run_program('eval.py', lambda: print('x' * {size}))", closed)
        assert (code, errors) == (1, ""), size


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full output needs /dev/full; run it on Linux")
@pytest.mark.parametrize(
    "main,unbuffered,ended",
    [
        ("print('x')", "", (2, FULL)),
        ("print('x' * 100_000)", "", (2, FULL)),
        ("print('x')", "1", (2, FULL)),
        (f"print('x'), {INTERRUPT}", "", (130, "\neval.py: interrupted\n")),
    ],
)
def test_a_full_output_is_one_line(main, unbuffered, ended):
    with open("/dev/full", "w") as full:
        code, _, errors = program(f"run_program('eval.py', lambda: ({main}))", full, PYTHONUNBUFFERED=unbuffered)
    assert (code, errors) == ended


@pytest.mark.parametrize("together,said", [({"WORLD_SIZE": "2"}, "done\n"), ({}, "done\nended\n")])
def test_one_of_several_processes_leaves_without_what_may_abort_it(monkeypatch, together, said):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    body = "import atexit\natexit.register(print, 'ended')\nrun_program('train.py', lambda: print('done'))"
    assert program(body, **together) == (0, said, "")


def test_what_the_output_cannot_encode_is_escaped():
    """A finished training must not end in a traceback at its sample."""
    body = "run_program('train.py', lambda: print('a sample \u27eb \U0001f600'))"
    assert program(body, PYTHONIOENCODING="ascii") == (0, "a sample \\u27eb \\U0001f600\n", "")
