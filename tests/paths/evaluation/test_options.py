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
ANSWERED = {  # {command line: (words on stdout, the beginning of the line on stderr, exit codes)}
    "eval.py --help": ("python eval.py attention RUN --sequences 200", "", ("0", "None")),
    "eval.py positions --help": ("--plot FILE", "", ("0",)),
    "train.py --help": ("B, lanes: documents that are read side by side", "", ("0",)),
    "eval.py positions . --typo": ("", "eval.py positions: unknown option --typo; did you", ("2",)),
    "train.py --typo 3": ("", "train.py: unknown option --typo; did you mean", ("2",)),
}


@pytest.mark.parametrize("argv", ANSWERED)
def test_a_command_line_is_answered_without_torch(argv):
    command = [sys.executable, "-c", SCRIPT, *argv.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    *shown, imported, ended = done.stdout.splitlines()
    words, said, codes = ANSWERED[argv]
    assert words in " ".join(" ".join(shown).split()), "what is shown"
    assert imported == "imported:", "a slow package is imported before the command line is read"
    assert ended.removeprefix("exit code: ") in codes, "the program's exit code"
    assert done.stderr.startswith(said), "the line on stderr"
    assert done.stderr.count("\n") == bool(said), "one line on stderr, or none"
