"""How many of our files a training step passes: what somebody must open who follows it.

Those of accelerated/fast/ do not count: it can be deleted, and what it computes stands elsewhere.
"""

import sys
from pathlib import Path

import pytest

import train as training_script
from accelerated.models import NAMES
from tests.conftest import ROOT
from tests.helpers.programs import train

OURS = ("train.py", "accelerated/", "reference/")
MOST = 13  # memory_replay.py is one of them, which serves other projects too


@pytest.fixture
def files(monkeypatch):
    """A set to which each file is added in which a function is called during step 3."""
    found = set()
    read = training_script.next_segments

    def note(frame, event, argument):
        if event == "call":
            found.add(frame.f_code.co_filename)

    def reading(run):
        sys.setprofile(note if run.step == 3 else None)
        return read(run)

    monkeypatch.setattr(training_script, "next_segments", reading)
    monkeypatch.setattr("accelerated.program.progress.SECONDS", 1e9)  # no line of progress
    yield found
    sys.setprofile(None)


@pytest.mark.parametrize("model", NAMES)
def test_a_training_step_passes_few_files(model, text, tmp_path, files):
    """Of the model's usual preset; the step writes no line of the log."""
    brief = ["--validation-tokens", 1, "--validate-every", 0, "--sample", 0]
    options = ["--model", model, "--data", text, "--batch", 2, "--steps", 4]
    train(*options, *brief, "--out", tmp_path / "run")
    paths = [Path(file).relative_to(ROOT) for file in files if Path(file).is_relative_to(ROOT)]
    names = [path.as_posix() for path in paths if path.as_posix().startswith(OURS)]
    passed = sorted(name for name in names if not name.startswith("accelerated/fast/"))
    print(len(passed), *passed)
    assert "train.py" in passed
    assert len(passed) <= MOST, f"{len(passed)} files, {MOST} are enough: {', '.join(passed)}"
