"""How programs end: what a user can mend is one line and exit code 2, an interrupt 130, and a mistake of ours a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerated.program.errors import InputError, begin_program, check_choice, option_name, run_program

ROOT = Path(__file__).parents[3]
OUT_OF_MEMORY = (
    "out of memory; give a smaller --batch, or in training a smaller --horizon, a larger --accumulate or --backprop memory_replay"
)


def run(program, unbuffered="", **how):
    """(exit code, stdout, stderr) of a Python program."""
    program = f"import os, signal, sys\nfrom accelerated.program.errors import *\n{program}"
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | {"PYTHONUNBUFFERED": unbuffered}} | how
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, **how)
    return done.returncode, done.stdout, done.stderr


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


@pytest.mark.parametrize(
    "error,line",
    [
        (InputError("--data x: no such file;\n give   another"), "--data x: no such file; give another"),
        (MemoryError(), OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), OUT_OF_MEMORY),
    ],
)
@pytest.mark.parametrize("start", ["begin", "run"])
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(monkeypatch, capsys, error, line, start):
    monkeypatch.setitem(sys.modules, "options", SimpleNamespace(parse=failing(error)))
    with pytest.raises(SystemExit) as caught:
        begin_program("train.py", "options") if start == "begin" else run_program("train.py", failing(error))
    assert caught.value.code == 2 and capsys.readouterr().err == f"train.py: {line}\n"


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("x"), ZeroDivisionError(), AssertionError()])
def test_a_mistake_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)) as caught:
        run_program("train.py", failing(error))
    assert caught.value is error


def test_an_error_of_a_file_names_it_and_is_no_error_of_the_output(capsys):
    with pytest.raises(SystemExit) as caught:
        run_program("train.py", lambda: Path("a" * 300).exists())
    line = f"train.py: cannot use {'a' * 300}: File name too long; give another, or change its permissions\n"
    assert caught.value.code == 2 and capsys.readouterr().err == line


def test_a_program_gets_what_its_command_line_says(monkeypatch):
    monkeypatch.setitem(sys.modules, "options", SimpleNamespace(parse=tuple))
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "3"])
    seen = []
    run_program("train.py", lambda *given: seen.append(given), *begin_program("train.py", "options"))
    assert seen == [("--steps", "3")]


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_ends_with_one_line_from_the_beginning_to_the_end(tmp_path, moment):
    """While the options are imported, while they are read, after that, and in the main function."""
    at = ["None"] * 4
    at[moment] = "os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "options.py").write_text(f"import os, signal\n{at[0]}\ndef parse(argv):\n    {at[1]}\n    return argv\n")
    program = (
        f"print('before')\nsys.path.append({str(tmp_path)!r})\nbegin_program('eval.py', 'options')\n{at[2]}\n"
        f"run_program('eval.py', lambda: {at[3]})\nprint('after')"
    )
    assert run(program) == (130, "before\n", "\neval.py: interrupted\n")


def test_an_interrupt_can_say_how_to_continue():
    program = "def main(): raise KeyboardInterrupt('the model is saved')\nrun_program('train.py', main)"
    assert run(program) == (130, "", "\ntrain.py: interrupted; the model is saved\n")


def test_an_interrupt_waits_for_no_thread():
    program = (
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(600)).start()\n"
        "run_program('train.py', lambda: os.kill(os.getpid(), signal.SIGINT))"
    )
    assert run(program, timeout=60)[0] == 130


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_reader_that_has_gone_is_no_error(size):
    """As in: python eval.py RUN | head."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        code, _, errors = run(f"run_program('eval.py', lambda: print('x' * {size}))", stdout=writer)
    finally:
        os.close(writer)
    assert (code, errors) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full output needs /dev/full; run it on Linux")
@pytest.mark.parametrize("size,unbuffered", [(10, ""), (100_000, ""), (10, "1")])
def test_a_full_output_is_one_line(size, unbuffered):
    with open("/dev/full", "w") as full:
        code, _, errors = run(f"run_program('eval.py', lambda: print('x' * {size}))", unbuffered, stdout=full)
    assert (code, errors) == (2, "eval.py: cannot write the output: No space left on device; send it elsewhere\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full output needs /dev/full; run it on Linux")
def test_an_interrupt_with_a_full_output_is_one_line():
    with open("/dev/full", "w") as full:
        program = "def main(): print('x'); os.kill(os.getpid(), signal.SIGINT)\nrun_program('eval.py', main)"
        code, _, errors = run(program, stdout=full)
    assert (code, errors) == (130, "\neval.py: interrupted\n")


@pytest.mark.parametrize("together,said", [({"WORLD_SIZE": "2"}, "done\n"), ({}, "done\nended\n")])
def test_one_of_several_processes_leaves_without_what_may_abort_it(monkeypatch, together, said):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in together.items():
        monkeypatch.setenv(name, value)
    code, output, errors = run("import atexit\natexit.register(print, 'ended')\nrun_program('train.py', lambda: print('done'))")
    assert (code, output, errors) == (0, said, "")


def test_a_choice_names_the_nearest_one():
    check_choice("--model", "memformer", ["memformer", "compressive"])
    with pytest.raises(InputError) as caught:
        check_choice("--model", "memoformer", ["memformer", "compressive"], InputError)
    assert str(caught.value) == "--model is 'memoformer'; it must be one of memformer, compressive (nearest: memformer)"
    assert option_name("train_bpe") == "--train-bpe"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_the_output_cannot_encode_is_escaped(encoding):
    """A finished training must not end in a traceback at its sample."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    code, printed, said = run("run_program('train.py', lambda: print('a sample \u27eb \U0001f600'))", env=environment)
    assert (code, printed, said) == (0, "a sample \\u27eb \\U0001f600\n", "")
