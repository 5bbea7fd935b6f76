"""An experiment keeps every run, goes on where it was interrupted, and says in one line what cannot work before it trains."""

import json
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
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)  # of this whole process
    monkeypatch.setattr(experiment, "machine", lambda: "A")

    def train(row, seed):
        conducted.trained.append((row, seed))
        return {"value": seed}

    def conducted(words, **changes):
        fields = {"rows": ["a", "b", "c"], "settings": {"updates": 50}, "train": train, "said": str, "page": json.dumps}
        words = ["--out", str(tmp_path), *words.split()]
        experiment.conduct(experiment.Experiment("toy", "A toy.", "toy", **(fields | changes)), words)

    conducted.trained = []
    return conducted


def test_what_was_trained_is_kept_and_not_trained_again(conduct, tmp_path, capsys):
    def interrupted(row, seed):
        if (row, seed) == ("a", 1):
            raise KeyboardInterrupt
        conduct.trained.append((row, seed))
        return {"value": seed}

    with pytest.raises(KeyboardInterrupt, match="what was trained is kept; continue with the same command"):
        conduct("--rows c a --seeds 0 1", train=interrupted)
    assert conduct.trained == [("c", 0), ("a", 0), ("c", 1)] and not (tmp_path / "toy.md").exists()
    for words in ("--rows c a --seeds 0 1", "--rows b --seeds 10 2", "--rows b --seeds 2 10"):
        conduct(words)
    assert conduct.trained[3:] == [("a", 1), ("b", 10), ("b", 2)]
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record == json.loads((tmp_path / "toy.md").read_text()) and record["settings"] == {"updates": 50}
    assert {row: list(runs.items()) for row, runs in record["runs"].items()} == {
        row: [(str(seed), {"value": seed, "seconds": 0.0}) for seed in seeds]
        for row, seeds in {"a": (0, 1), "b": (2, 10), "c": (0, 1)}.items()
    }
    assert list(record["runs"]) == ["a", "b", "c"]
    assert "b, seed 10: {'value': 10, 'seconds': 0.0}, 0 s\n" in capsys.readouterr().out


def test_all_rows_have_three_seeds_and_a_record_names_every_machine(conduct, tmp_path, monkeypatch):
    conduct("--rows b --seeds 0")
    (tmp_path / "toy.json").write_text(json.dumps(json.loads((tmp_path / "toy.json").read_text()) | {"runs": {}}))
    for name, words in {"B": "--rows b --seeds 0", "A": ""}.items():
        monkeypatch.setattr(experiment, "machine", lambda name=name: name)
        conduct(words)
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record["machine"] == "A and B" and conduct.trained[:3] == [("b", 0), ("b", 0), ("a", 0)], "no runs are no error"
    assert {row: list(runs) for row, runs in record["runs"].items()} == {row: ["0", "1", "2"] for row in "abc"}


REFUSED = {  # what: (words, fields of the experiment, an earlier record, the message)
    "a row": ("--rows d", {}, None, "--rows is 'd'; it must be one of a, b, c"),
    "a seed": ("--seeds 0 -1", {}, None, "--seeds -1 must be at least 0"),
    "a file as folder": ("--out FOLDER/file", {}, None, "cannot write .*; give another --out"),
    "other settings": ("", {}, '{"settings": 5}', "toy.json has runs of other settings, 5 and not {'updates': 50}"),
    "half a record": ("", {}, '{"settings": ', r"toy\.json cannot be read .*; remove it, or give another --out"),
    "no settings": ("", {}, "{}", r"toy\.json cannot be read \(KeyError"),
    "a list": ("", {}, "[]", r"toy\.json cannot be read \(TypeError"),
    "no matplotlib": ("", {"draw": print}, None, "plots need the package matplotlib"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_trained(conduct, tmp_path, monkeypatch, what):
    words, fields, record, message = REFUSED[what]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    files = {"file": "", **({"toy.json": record} if record else {})}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        conduct(words.replace("FOLDER", str(tmp_path)), **fields)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix != ".lock"}
    assert not conduct.trained and kept == files and "\n" not in str(caught.value)


def test_two_commands_do_not_write_one_record(conduct, tmp_path):
    with FileLock(tmp_path / "toy.lock"), pytest.raises(InputError, match=r"another process trains for .*toy\.md"):
        conduct("")
    assert not conduct.trained
    conduct("--seeds 0")
    assert len(conduct.trained) == 3


KEPT = {  # page: (its program, the settings of its record)
    "ablations": (ablations, {name: own.options for name, own in ablations.ABLATIONS.items()}),
    "compressive-figure-5": (agent, agent.SETTINGS),
    "pretrained_recurrence-3": (questions, questions.SMALL),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_kept_page_is_that_of_its_record(name):
    """Of today's settings, and of all rows in their order, except that not all rates of an ablation were trained."""
    program, settings = KEPT[name]
    page = Path(__file__).parents[2] / "docs" / "results" / f"{name}.md"
    record = json.loads(page.with_suffix(".json").read_text())
    assert page.read_text() == program.page(record) and record["settings"] == settings
    assert list(record["runs"]) == [row for row in program.ROWS if row in record["runs"] or program is not ablations]
