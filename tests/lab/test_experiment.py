"""An experiment keeps every run, goes on where it was interrupted, and says in one line what cannot work before it trains."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from accelerated.lab import ablations, experiment
from accelerated.lab.systems import agent, questions
from accelerated.program.errors import InputError


@pytest.fixture
def conduct(tmp_path, monkeypatch):
    """conduct(words, **changes) is the command of an experiment; conduct.trained lists the (row, seed) of all its runs."""
    monkeypatch.setattr(
        experiment.torch, "set_num_threads", lambda count: None
    )  # of this whole process

    def train(row, seed):
        if (row, seed) == conducted.interrupted:
            raise KeyboardInterrupt
        conducted.trained.append((row, seed))
        return {"value": seed}

    def conducted(words, **changes):
        fields = {
            "rows": ["a", "b", "c"],
            "settings": {"updates": 50},
            "train": train,
            "said": str,
            "page": json.dumps,
            "draw": lambda record, path: None,
        }
        words = ["--out", str(tmp_path), *words.split()]
        experiment.conduct(
            experiment.Experiment("toy", "A toy.", "toy", **(fields | changes)), words
        )

    conducted.trained, conducted.interrupted = [], None
    return conducted


def test_what_was_trained_is_kept_and_not_trained_again(conduct, tmp_path):
    conduct.interrupted = "a", 1
    with pytest.raises(
        KeyboardInterrupt, match="what was trained is kept; continue with the same command"
    ):
        conduct("--rows c a --seeds 0 1")
    assert conduct.trained == [("c", 0), ("a", 0), ("c", 1)] and not (tmp_path / "toy.md").exists()
    conduct.interrupted = None
    for words in ("--rows c a --seeds 0 1", "--rows b --seeds 10 2", ""):
        conduct(words)
    assert conduct.trained[3:] == [
        ("a", 1),
        ("b", 10),
        ("b", 2),
        ("b", 0),
        ("b", 1),
        ("a", 2),
        ("c", 2),
    ]
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record == json.loads((tmp_path / "toy.md").read_text()) and record["settings"] == {
        "updates": 50
    }
    assert [*record["runs"]] == ["a", "b", "c"] and [*record["runs"]["b"]] == ["0", "1", "2", "10"]
    assert record["machine"] == experiment.machine()
    assert record["runs"]["b"]["10"]["value"] == 10


REFUSED = {  # what: (words, fields of the experiment, an earlier record, the message)
    "other settings": (
        "",
        {},
        '{"settings": 5}',
        "toy.json has runs of other settings, 5 and not {'updates': 50}",
    ),
    "no matplotlib": ("", {}, None, "plots need the package matplotlib"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_trained(
    conduct, tmp_path, monkeypatch, what
):
    words, fields, record, message = REFUSED[what]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    if record:
        (tmp_path / "toy.json").write_text(record)
    with pytest.raises(InputError, match=message):
        conduct(words, **fields)
    assert not conduct.trained and (not record or (tmp_path / "toy.json").read_text() == record)


def test_two_commands_do_not_write_one_record(conduct, tmp_path):
    with (
        FileLock(tmp_path / "toy.lock"),
        pytest.raises(InputError, match=r"another process trains for .*toy\.md"),
    ):
        conduct("")
    assert not conduct.trained


KEPT = {"ablations": ablations, "compressive-figure-5": agent, "pretrained_recurrence-3": questions}


@pytest.mark.parametrize("name", KEPT)
def test_a_command_writes_the_kept_page_of_the_kept_runs(name, tmp_path, monkeypatch):
    """Of today's settings. Not all rates of an ablation were trained with all seeds."""
    monkeypatch.setattr(
        experiment.torch, "set_num_threads", lambda count: None
    )  # of this whole process
    kept, own = (
        Path(__file__).parents[2] / "docs" / "results",
        KEPT[name].EXPERIMENT._replace(train=None),
    )  # nothing is missing
    runs = json.loads(Path(shutil.copy(kept / f"{name}.json", tmp_path)).read_text())["runs"]
    rows = [row for row in own.rows if len(runs.get(row, [])) == 3]
    experiment.conduct(own, ["--rows", *rows, "--out", str(tmp_path)])
    assert (tmp_path / f"{name}.md").read_text() == (kept / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.svg").exists() == (kept / f"{name}.svg").exists()
