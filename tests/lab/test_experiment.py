"""An experiment keeps every run, goes on where it was interrupted, and says in one line what cannot work before it trains."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

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
    monkeypatch.setattr(experiment, "time", SimpleNamespace(monotonic=iter(range(99)).__next__))  # a run takes a second

    def train(row, seed):
        if (row, seed) == conducted.interrupted:
            raise KeyboardInterrupt
        conducted.trained.append((row, seed))
        return {"value": seed}

    def conducted(words, **changes):
        fields = {"rows": ["a", "b", "c"], "settings": {"updates": 50}, "train": train, "said": str, "page": json.dumps}
        words = ["--out", str(tmp_path), *words.split()]
        experiment.conduct(experiment.Experiment("toy", "A toy.", "toy", **(fields | changes)), words)

    conducted.trained, conducted.interrupted = [], None
    return conducted


def test_what_was_trained_is_kept_and_not_trained_again(conduct, tmp_path, capsys, monkeypatch):
    """A record names every machine."""
    conduct.interrupted = "a", 1
    with pytest.raises(KeyboardInterrupt, match="what was trained is kept; continue with the same command"):
        conduct("--rows c a --seeds 0 1")
    assert conduct.trained == [("c", 0), ("a", 0), ("c", 1)] and not (tmp_path / "toy.md").exists()
    conduct.interrupted = None
    for machine, words in (("B", "--rows c a --seeds 0 1"), ("A", "--rows b --seeds 10 2"), ("B", "--rows b --seeds 2 10")):
        monkeypatch.setattr(experiment, "machine", lambda machine=machine: machine)
        conduct(words)
    assert conduct.trained[3:] == [("a", 1), ("b", 10), ("b", 2)]
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record == json.loads((tmp_path / "toy.md").read_text()) and record["settings"] == {"updates": 50}
    seeds = [(row, list(runs)) for row, runs in record["runs"].items()]
    assert seeds == [("a", ["0", "1"]), ("b", ["2", "10"]), ("c", ["0", "1"])]
    assert record["runs"]["b"]["10"] == {"value": 10, "seconds": 1}
    assert record["machine"] == "A and B" and "b, seed 10: {'value': 10, 'seconds': 1}, 1 s\n" in capsys.readouterr().out


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


KEPT = {  # page: (its program, the settings of its record, what is said of a run)
    "ablations": (ablations, {name: own.options for name, own in ablations.ABLATIONS.items()}, "bits per byte, "),
    "compressive-figure-5": (agent, agent.SETTINGS, "rate-2, seed 0: 90.0% right at the end, "),
    "pretrained_recurrence-3": (questions, questions.SMALL, "recurrent, seed 2: F1 99.7, exact match 99.7, "),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_command_writes_the_kept_page_of_the_kept_runs(name, tmp_path, monkeypatch, capsys):
    """Of today's settings; not all rates of an ablation were trained with all seeds."""
    program, settings, said = KEPT[name]
    page = Path(__file__).parents[2] / "docs" / "results" / f"{name}.md"
    record = json.loads(page.with_suffix(".json").read_text())
    assert page.read_text() == program.page(record) and record["settings"] == settings
    rows = [row for row in program.ROWS if len(record["runs"].get(row, [])) == 3]
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)
    again = program.EXPERIMENT._replace(train=lambda row, seed: record["runs"][row][str(seed)])
    experiment.conduct(again, ["--rows", *rows, "--out", str(tmp_path)])
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["settings"] == settings and [*written["runs"]] == rows
    assert (tmp_path / f"{name}.md").read_text() == program.page(written) and said in capsys.readouterr().out
    assert (tmp_path / f"{name}.svg").exists() == page.with_suffix(".svg").exists() == (f"({name}.svg)" in page.read_text())
