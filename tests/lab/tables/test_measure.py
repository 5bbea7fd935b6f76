"""A table's rows are tuned alike, trained with all seeds, evaluated and timed in turn, by a command that refuses in one line."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from accelerated.lab.tables import measure as module
from accelerated.lab.tables.__main__ import parse_options
from accelerated.lab.tables.measure import best, measure, settings_of, step_times, train_rows
from accelerated.lab.tables.page import page
from accelerated.lab.tables.table import Measure, Panel, Row
from accelerated.lab.trials import LOG, Trial, Workshop
from tests.helpers.programs import TWO, Rehearsal, evaluate, refusal, train


def test_what_cannot_be_measured_is_refused_and_each_core_has_a_run(tmp_path):
    words = ["recall-rewriting", "--out", str(tmp_path), "--runs", str(tmp_path / "x")]
    assert "nearest: memformer-" in refusal(parse_options, ["memformer-9", *words[1:]])
    assert "--jobs 0 must be at least 1" in refusal(parse_options, [*words, "--jobs", "0"])
    assert not (tmp_path / "x").exists()
    assert parse_options(words).jobs == os.cpu_count() and parse_options([*words, "--jobs", "3"]).jobs == 3


def test_step_times_are_of_1000_tokens_and_rows_take_turns(monkeypatch):
    """The clock says 2 s for the first row's step. The second reads twice as many tokens, as does the fourth, in two segments;
    half of the third's are not new."""
    turns = []

    def clock(calls, repeats, device):
        turns.append(len(calls))
        return {row: [seconds] * repeats for row, seconds in zip(calls, (2.0, 6.0, 2.0, 4.0), strict=True)}

    monkeypatch.setattr(module, "time_in_turn", clock)
    monkeypatch.setattr(module, "keep_freed_memory", lambda: turns.append("memory is kept"))
    options = "--model compressive --width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 1 --segment 8 --batch"
    overlapping = "--model pretrained_recurrence --width 8 --heads 2 --feed-forward 8 --segment 8 --overlap 4 --horizon 1 --batch"
    rows = [f"{options} 5", f"{options} 10", f"{overlapping} 5", f"{options} 5 --horizon 2", f"{options} 5"]
    seconds = step_times([settings_of(Trial("", words)) for words in rows])
    assert [of_row[0] for of_row in seconds] == [50.0, 75.0, 100.0, 50.0, 50.0]
    assert turns == ["memory is kept", 4], "the same settings once"


def test_rows_are_tuned_alike_on_seed_0_and_trained_with_their_own_choice_and_all_seeds(tmp_path):
    """From a first run that is trained before them. The rehearsal's training losses are the negative of its validations."""
    shop = Rehearsal(tmp_path, loss={"--x 1 --rate 2": 0.5, "--x 2 --rate 3": 0.25})
    grid, rows = ["--rate 1", "--rate 2", "--rate 3"], TWO.rows | {"c": Row("--x 3")}
    table = TWO._replace(options="--init FIRST --width 8", first="--width 8 --long", rows=rows, grid=grid)
    tuning, trials = train_rows(table, shop)
    first = shop.folder(Trial("", "--width 8 --long"))
    assert first.exists() and "--init" not in shop.calls[0]
    losses = {"a": [1.0, 0.5, 1.0], "b": [1.0, 1.0, 0.25], "c": [1.0] * 3}
    assert tuning == {name: dict(zip(grid, own, strict=True)) for name, own in losses.items()}
    assert all("--seed 0" in " ".join(call) for call in shop.calls[:10]) and len(shop.calls) == 1 + 9 + 3 * 2
    for name, own in {"a": "--x 1 --rate 2", "b": "--x 2 --rate 3", "c": "--x 3 --rate 1"}.items():
        assert own.endswith(best(tuning[name])), "of a tie the earlier one"
        assert trials[name] == [Trial(name, f"--init {first} --width 8 {own}", seed) for seed in (0, 1, 2)]
        assert all(shop.folder(trial).exists() for trial in trials[name])
    trials = train_rows(table._replace(headline=["b"]), shop)[1]
    assert {name: len(of_row) for name, of_row in trials.items()} == {"a": 3, "b": 5, "c": 3}
    tuning, _ = train_rows(table._replace(tuned_by=["last tenth", "the end of training"]), shop)
    assert best(tuning["a"]) == "--rate 1" and tuning["b"]["--rate 3"] == -0.25, "a table's own score chooses"


def test_what_drawing_needs_is_missed_before_any_training(tmp_path, monkeypatch):
    shop, table = Rehearsal(tmp_path), TWO._replace(picture=[Panel("", "", {}, [])])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "plots need the package matplotlib" in refusal(measure, "a-table", table, shop, tmp_path) and not shop.calls


class Scripts(Workshop):
    """A workshop that calls train.py and eval.py in this process."""

    def run(self, command):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            {"train.py": train, "eval.py": evaluate}[Path(command[1]).name](*command[2:])
        return 0, output.getvalue(), ""

    def in_parallel(self, calls):
        for function, *given in calls:
            function(*given)


def test_a_small_table_from_the_command_to_the_page(tmp_path, monkeypatch):
    """Two rows with one choice each, one seed, trained and evaluated by the real scripts."""
    monkeypatch.setattr(module, "SEEDS", (0,))
    text, said = tmp_path / "text", []
    content = "".join(f"def f{n}(x):\n    return x + {n % 7}\n" for n in range(200))
    monkeypatch.setitem(module.PREPARE, "text", lambda: text.write_text(content))
    small = f"--data {text} --width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 1 --recurrent-layers none"
    table = TWO._replace(
        options=f"{small} --batch 2 --steps 2 --warmup 1",
        rows={"a": Row("--window 8 --segment 8", asked="--clear-memory"), "b": Row("--window 8 --segment 8")},
        measures=[Measure("test", "score --split test", "bits_per_byte"), Measure("end", LOG, "validation")],
        grid=["--learning-rate 0.01"],
        prepare="text",
        picture=[Panel("", "", {"1": "* @ test"}, ["a", "b"])],
    )
    measure("a-table", table, Scripts(tmp_path / "runs", 1, say=said.append), tmp_path)
    record = json.loads((tmp_path / "a-table.json").read_text())
    a, b = record["rows"]
    [run] = (tmp_path / "runs").iterdir()  # rows with the same options share it
    assert said[-1] == f"a .. b: {run}", "a user finds it for eval.py"
    assert a["measured"]["end"] == b["measured"]["end"] and a["parameters"] == b["parameters"] > 0
    assert a["measured"]["test"][0] != b["measured"]["test"][0], "a is read with its memory cleared"
    assert a["options"] == "--window 8 --segment 8" and len(a["step_seconds"]) > 3
    assert (tmp_path / "a-table.md").read_text() == page(table, record) and (tmp_path / "a-table.svg").exists()
