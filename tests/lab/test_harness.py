"""An experiment keeps every run and goes on where it was interrupted.

What cannot work is said in one line before it trains.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from accelerated.lab import harness
from accelerated.lab.systems import agent
from tests.helpers.programs import refusal


@pytest.fixture
def conduct(tmp_path):
    """conduct(words) is the command of an experiment.

    Its `trained` lists the (row, seed) of all its runs; `interrupted` is one that never ends.
    """

    def train(row, seed):
        if (row, seed) == conducted.interrupted:
            raise KeyboardInterrupt
        conducted.trained.append((row, seed))
        return {"value": seed}

    def conducted(words):
        toy = harness.Experiment(
            name="toy",
            rows=["a", "b", "c"],
            settings={"updates": 50},
            train=train,
            said=str,
            shown=(json.dumps, lambda record, path: None),
        )
        parser = harness.part_parser("toy", "A toy.")
        harness.conduct(toy, parser.parse(["--out", str(tmp_path), *words.split()]))

    conducted.trained = []
    conducted.interrupted = None
    return conducted


def test_what_was_trained_is_kept_and_not_trained_again(conduct, tmp_path):
    conduct.interrupted = "a", 1
    words = "what was trained is kept; continue with the same command"
    with pytest.raises(KeyboardInterrupt, match=words):
        conduct("--rows c a --seeds 0 1")
    assert conduct.trained == [("c", 0), ("a", 0), ("c", 1)]
    assert not (tmp_path / "toy.md").exists()
    conduct.interrupted = None
    for words in ("--rows c a --seeds 0 1", "--rows b --seeds 10 2"):
        conduct(words)
        assert not (tmp_path / "toy.md").exists(), "of a part"
    conduct("")
    later = [f"{row}{seed}" for row, seed in conduct.trained[3:]]
    assert later == ["a1", "b10", "b2", "b0", "b1", "a2", "c2"]
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record == json.loads((tmp_path / "toy.md").read_text())
    assert record["settings"] == {"updates": 50}
    trained = {row: {*runs} for row, runs in record["runs"].items()}
    whole = {"0", "1", "2"}
    assert trained == {"a": whole, "b": whole | {"10"}, "c": whole}
    assert record["machine"] == harness.machine()
    assert record["runs"]["b"]["10"]["value"] == 10


def test_a_record_names_every_machine_that_trained_for_it(conduct, tmp_path, monkeypatch):
    for machine in ("one", "another", "one"):
        monkeypatch.setattr(harness, "machine", lambda machine=machine: machine)
        conduct(f"--rows a --seeds {len(conduct.trained)}")
    assert json.loads((tmp_path / "toy.json").read_text())["machine"] == "one and another"


# What the record holds | words of the command => a part of the message
REFUSED = """
{ | --rows a d => --rows is 'd'; it must be one of a, b, c
{ | => toy.json is no record of runs (
[] | => toy.json is no record of runs (
{"settings": {"updates": 50}} | => toy.json is no record of runs (
{"settings": 5, "date": "", "machine": "", "torch": "", "python": "", "runs": {}} | => \
toy.json has runs of other settings, 5 and not {'updates': 50}
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_cannot_be_used_is_refused_before_anything_is_trained(conduct, tmp_path, row):
    given, message = row.split("=> ")
    content, words = given.split("|")
    record = tmp_path / "toy.json"
    record.write_text(content)
    assert message in refusal(conduct, words)
    assert not conduct.trained
    assert record.read_text() == content


def test_without_matplotlib_nothing_is_trained(conduct, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "plots need the package matplotlib" in refusal(conduct, "")
    assert not conduct.trained


def test_two_commands_do_not_write_one_record(conduct, tmp_path):
    with FileLock(tmp_path / "toy.lock"):
        error = refusal(conduct, "")
    assert error.startswith(f"another process trains for {tmp_path / 'toy.json'}")
    assert not conduct.trained


AGENTS = "compressive-figure-5"


def test_a_command_writes_the_kept_page_of_the_kept_runs(tmp_path, monkeypatch):
    """Of today's settings. It has all that the command trains."""
    kept = Path(__file__).parents[2] / "docs" / "results"
    shutil.copy(kept / f"{AGENTS}.json", tmp_path)
    monkeypatch.setattr(agent, "EXPERIMENT", agent.EXPERIMENT._replace(train=None))
    monkeypatch.setattr(agent.torch, "set_num_threads", lambda count: None)  # of this process
    agent.main(["--out", str(tmp_path)])
    assert (tmp_path / f"{AGENTS}.md").read_text() == (kept / f"{AGENTS}.md").read_text()
    assert (tmp_path / f"{AGENTS}.svg").exists()


def test_a_part_is_not_written_over_a_page(conduct, tmp_path, monkeypatch):
    """docs/results has the whole; a part has a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for words in ("--rows a", "--seeds 0", "--rows a b c --seeds 0 1 2"):
        assert "has the pages of whole tables" in refusal(conduct, f"{words} --out docs/results")
    assert not conduct.trained
    conduct("--rows a --seeds 0 --out docs/../part")
    assert not [*(tmp_path / "docs" / "results").iterdir()]
    assert conduct.trained == [("a", 0)]
    for seeds, out in (([1], "runs/parts"), (None, "docs/results")):
        options = argparse.Namespace(rows=None, seeds=seeds, out=None)
        harness.settle_part(options, "abc")
        assert options.out == Path(out)
