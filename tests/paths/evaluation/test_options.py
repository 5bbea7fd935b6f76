"""The command lines of eval.py and train.py are answered at once: without torch and other packages
that are slow to import.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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
ANSWERED = {
    "eval.py --help": (None, "python eval.py attention RUN --sequences 200"),
    "eval.py positions --help": (0, "--plot FILE"),
    "eval.py positions . --typo": (
        2,
        "eval.py positions: unknown option --typo; did you mean --pool?",
    ),
    "eval.py nonsense": (2, "eval.py: this is no run's folder, and the report is 'nonsense'"),
    "eval.py sample . --seed 12345678901234567890": (2, "it must be at least 0 and below 2^32"),
    "eval.py sample . --prompt-file nowhere": (
        2,
        "eval.py: cannot use nowhere: No such file or directory; give another",
    ),
    "train.py --help": (0, "--learning-rate"),
    "train.py --typo 3": (2, "train.py: unknown option --typo; did you mean"),
}


@pytest.mark.parametrize("argv", ANSWERED)
def test_the_command_line_is_read_without_torch(argv):
    code, words = ANSWERED[argv]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv.split()], cwd=ROOT, capture_output=True, text=True
    )
    *shown, imported, ended = done.stdout.splitlines()
    assert (imported, ended) == ("imported:", f"exit code: {code}"), done.stderr
    assert words in (done.stderr if code == 2 else "\n".join(shown)) and done.stderr.count(
        "\n"
    ) == (code == 2)
