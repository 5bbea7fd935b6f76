"""The command lines of eval.py and train.py are answered at once, without slow packages."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SLOW_TO_IMPORT = (
    "torch",
    "tiktoken",
    "tqdm",
    "matplotlib",
    "filelock",
    "urllib.request",
    "tokenizers",
    "datasets",
)
# Runs the script with the arguments given, and prints what it imported and its exit code
SCRIPT = f"""
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("imported:", *(name for name in {SLOW_TO_IMPORT} if name in sys.modules))
    print("exit code:", end.code)
"""
ANSWERED = {  # {command line: words on stdout}
    "eval.py --help": "python eval.py attention RUN --sequences 200",
    "eval.py positions --help": "--plot FILE",
    "train.py --help": "B, lanes: documents that are read side by side",
}
REFUSED = {  # {command line: the beginning of the line on stderr}
    "eval.py positions . --typo": "eval.py positions: unknown option --typo; did you mean --pool?",
    "eval.py nonsense": "eval.py: this is no run's folder, and the report is 'nonsense'",
    "eval.py no/run": "eval.py: no run at no/run; give a folder that train.py wrote with --out",
    "eval.py sample . --prompt-file nowhere": "eval.py: cannot use nowhere: No such file or",
    "eval.py sample . --seed 12345678901234567890": "eval.py sample: argument --seed: 12345",
    "train.py --typo 3": "train.py: unknown option --typo; did you mean",
}


def answer(argv, *flags):
    """(lines on stdout, packages that were imported, exit code, stderr) of a command line."""
    command = [sys.executable, *flags, "-c", SCRIPT, *argv.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    *shown, imported, ended = done.stdout.splitlines()
    packages = imported.removeprefix("imported:").split()
    return "\n".join(shown), packages, ended.removeprefix("exit code: "), done.stderr


@pytest.mark.parametrize("flags", [(), ("-OO",)], ids=["usual", "without docstrings"])
@pytest.mark.parametrize("argv", ANSWERED)
def test_help_is_printed_without_torch(argv, flags):
    shown, packages, code, errors = answer(argv, *flags)
    assert ANSWERED[argv] in " ".join(shown.split())
    assert packages == []
    assert code in ("0", "None")
    assert errors == ""


@pytest.mark.parametrize("argv", REFUSED)
def test_a_wrong_command_line_is_refused_without_torch(argv):
    _, packages, code, errors = answer(argv)
    assert errors.startswith(REFUSED[argv])
    assert errors.count("\n") == 1
    assert packages == []
    assert code == "2"
