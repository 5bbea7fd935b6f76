"""The command that trains agents keeps each of them, continues, refuses other settings, and says what came out."""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from accelerated.lab import experiment
from accelerated.lab.systems import agent, agents
from accelerated.program.errors import InputError

RESULTS = Path(__file__).parents[2] / "docs" / "results"
OPTIONS = ["--rows", "rate-4", "lstm", "--seeds", "0", "1", "--updates", "50"]


@pytest.fixture
def trained(monkeypatch):
    """Agents that are trained at once: those of rate 4 are right ever more often, the others half of the time."""
    asked = []

    def curve(row, seed, updates):
        asked.append((row, seed))
        return [min(1.0, 0.5 + 0.1 * point * (row == "rate-4") + 0.02 * seed) for point in range(updates // 10)], 60.0 + seed

    monkeypatch.setattr(agents, "curve", curve)
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)  # of this whole process
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot: matplotlib")
    return asked


def test_the_page_says_what_came_out(trained, tmp_path, capsys):
    agents.main([*OPTIONS, "--out", str(tmp_path / "pages")])
    page = (tmp_path / "pages" / "compressive-figure-5.md").read_text()
    assert trained == [("rate-4", 0), ("lstm", 0), ("rate-4", 1), ("lstm", 1)]
    assert "| rate-4 | 0, 1 | 91.0 (90.0 .. 92.0) | 0.23, 0.23 | 1.0 |" in page  # 5 points of 10 x 128 x 36 steps
    assert "| lstm | 0, 1 | 51.0 (50.0 .. 52.0) | not, not | 1.0 |" in page
    assert "0.23 million steps: 50 updates of 128 episodes of 36" in page.replace("\n", " ")
    assert max(map(len, page.splitlines())) <= 120 and "](compressive-figure-5.svg)" in page
    assert (tmp_path / "pages" / "compressive-figure-5.svg").read_text().startswith("<?xml")
    assert "rate-4, seed 1: 92.0% right at the end, 61 s" in capsys.readouterr().out


def test_what_was_trained_is_kept_and_not_trained_again(trained, tmp_path, monkeypatch):
    curve, out = agents.curve, ["--out", str(tmp_path)]

    def interrupted(row, seed, updates):
        if (row, seed) == ("rate-4", 1):
            raise KeyboardInterrupt
        return curve(row, seed, updates)

    monkeypatch.setattr(agents, "curve", interrupted)
    with pytest.raises(KeyboardInterrupt, match="what was trained is kept; continue with the same command"):
        agents.main([*OPTIONS, *out])
    assert not (tmp_path / "compressive-figure-5.md").exists()
    monkeypatch.setattr(agents, "curve", curve)
    agents.main([*OPTIONS, *out])
    agents.main(["--rows", "rate-1", "--seeds", "10", "2", "--updates", "50", *out])
    assert trained == [("rate-4", 0), ("lstm", 0), ("rate-4", 1), ("lstm", 1), ("rate-1", 10), ("rate-1", 2)]
    record = json.loads((tmp_path / "compressive-figure-5.json").read_text())
    assert list(record["runs"]) == ["rate-1", "rate-4", "lstm"] and list(record["runs"]["rate-1"]) == ["2", "10"]


def test_a_record_names_every_machine_that_trained_for_it(trained, tmp_path, monkeypatch):
    for name, row in (("2 cores of A", "lstm"), ("2 cores of B", "rate-4"), ("2 cores of A", "rate-1")):
        monkeypatch.setattr(experiment, "machine", lambda name=name: name)
        agents.main(["--rows", row, "--seeds", "0", "--updates", "50", "--out", str(tmp_path)])
    assert "2 cores of A and 2 cores of B, torch" in (tmp_path / "compressive-figure-5.md").read_text().replace("\n", " ")


def test_input_that_cannot_work_is_one_line_and_changes_nothing(trained, tmp_path):
    path = tmp_path / "compressive-figure-5.json"
    agents.main([*OPTIONS, "--out", str(tmp_path)])
    for words, line in (
        (["--updates", "60"], "has runs of other settings, .*'updates': 50} and not .*'updates': 60}; give another --out"),
        (["--rows", "rate-5"], "--rows is 'rate-5'; it must be one of rate-1, .*nearest: rate-"),
        (["--updates", "9"], "--updates 9 must be at least 10"),
        (["--seeds", "0", "-1"], "--seeds -1 must be at least 0"),
    ):
        before = path.read_bytes()
        with pytest.raises(InputError, match=line):
            agents.main([*OPTIONS, *words, "--out", str(tmp_path)])
        assert path.read_bytes() == before
    path.write_text('{"settings": ')
    with pytest.raises(InputError, match=r"figure-5\.json cannot be read .*; remove it, or give another --out"):
        agents.main([*OPTIONS, "--out", str(tmp_path)])
    assert path.read_text() == '{"settings": '
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*; give another --out"):
        agents.main([*OPTIONS, "--out", str(tmp_path / "file")])
    assert len(trained) == 4


def test_two_commands_do_not_write_one_record(trained, tmp_path):
    with FileLock(tmp_path / "compressive-figure-5.lock"), pytest.raises(InputError, match="another process trains for"):
        agents.main([*OPTIONS, "--out", str(tmp_path)])
    assert not trained
    agents.main([*OPTIONS, "--out", str(tmp_path)])


def test_a_point_of_a_curve_is_a_mean_of_ten_updates(monkeypatch):
    given, updates = [], iter(range(99))
    monkeypatch.setattr(agent, "train", lambda core, settings, seed: given.append((core, settings, seed)) or updates)
    successes, seconds = agents.curve("rate-3", 7, 25)
    assert successes == [4.5, 14.5] and seconds < 60 and next(updates) == 25, "it stops in time"
    [(core, settings, seed)] = given
    assert core.config.compression_rate == 3 and settings == agent.Settings() and seed == 7
    assert not agent.make_core("compressive", 7).embedding.ne(core.embedding).any()


def test_every_row_can_be_made():
    for core, sizes in agents.ROWS.values():
        agent.make_core(core, 0, **sizes)


def test_the_kept_page_is_that_of_its_record():
    record = json.loads((RESULTS / "compressive-figure-5.json").read_text())
    assert (RESULTS / "compressive-figure-5.md").read_text() == agents.page(record)
    assert record["settings"] == agent.Settings()._asdict() | {"updates": 500}
    points = {len(found["successes"]) for own in record["runs"].values() for found in own.values()}
    assert points == {50} and record["runs"].keys() <= agents.ROWS.keys()
