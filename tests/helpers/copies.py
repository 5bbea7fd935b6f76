"""A copy of the project, for tests that take something away from it or add to it."""

import os
import shutil
import subprocess
import sys

from tests.conftest import ROOT
from tests.helpers.programs import words


def copy_of_the_project(folder, without=""):
    """Copy the project into a folder, except what has this name; returns the folder."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", without)
    for name in ("accelerated", "reference", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("train.py", "eval.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(project, *given):
    """What a program of a copy prints; it must end well."""
    command = [sys.executable, *words(*given)]
    environment = os.environ | {"PYTHONPATH": str(project)}
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
