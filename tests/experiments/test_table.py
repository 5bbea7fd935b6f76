"""A table's page says what was measured; an ordering is judged seed by seed; rows differ only in what the table is about."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelerated.experiments.__main__ import GPU_JOBS, TABLES, parse_options
from accelerated.experiments.recall import DISTANCE, METHODS, TASKS, tokens_to_read
from accelerated.experiments.table import (
    CARRIED,
    Measure,
    Ordering,
    Row,
    Scale,
    Table,
    differences,
    filled,
    join,
    mean_and_spread,
    measure,
    page,
    product,
    settings_of,
    step_times,
    verdict,
)
from accelerated.experiments.trials import Trial, Workshop
from accelerated.program.errors import InputError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
BEGUN = re.compile(r"--init \S+")
EVERY = [(name, scale) for name, table in TABLES.items() for scale in table.scales]


def row_settings(name, scale_name, row):
    """The Settings of a row as it is trained, of a row that begins from another run without its weights."""
    table, scale = TABLES[name], TABLES[name].scales[scale_name]
    options = filled(join(scale.options, row.options), row, scale._replace(sizes=scale.sizes | {"first": "FIRST"}))
    if BEGUN.search(options):
        options = join(filled(scale.first, row, scale), BEGUN.sub("", options))
    return settings_of(Trial(row.name, join(options, scale.grid[0]))), table


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_all_rows_can_be_trained_and_read_as_many_tokens(name, scale):
    """In an update, and the methods of the recall family, which are trained in different ways, in all."""
    tokens = {}
    for row in TABLES[name].rows:
        settings, _ = row_settings(name, scale, row)
        training = settings.training
        tokens[row.name] = training.batch * training.horizon * settings.model_config.segment
        if name == "recall":
            tokens[row.name] = round(tokens[row.name] * training.steps / tokens_to_read(settings.recall), 1)
    assert len(set(tokens.values())) == 1, tokens


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_rows_of_a_table_train_as_long_on_the_same_text(name, scale):
    """Not those of the table that is about the text, of that about the rate, and of the recall family."""
    alike = ("steps", "optimizer", "warmup", "clip", "dtype", "seed", "weight_decay")
    found = [row_settings(name, scale, row)[0] for row in TABLES[name].rows]
    assert len({(s.data, *(getattr(s.training, field) for field in alike)) for s in found}) == 1 or name in (
        "text",
        "compressive-3",
        "recall",
    )


def test_a_task_of_the_recall_family_is_what_its_options_give():
    """Whatever the preset of a model says: each has a recall task of its own."""
    for row in TABLES["recall"].rows:
        label = row.name.partition(" | ")[2].removesuffix(", large state")
        config = TASKS.get(label, DISTANCE)
        assert row_settings("recall", "small", row)[0].recall == config, row.name


def test_a_cell_of_the_recall_family_asks_at_its_distance_and_a_large_state_holds_four_times_as_much():
    rows = {row.name: row for row in TABLES["recall"].rows}
    for method in METHODS:
        asked = [row.sizes["asked"] for name, row in rows.items() if name.startswith(f"{method} | distance ")]
        assert asked == [f"--recall-distance {16 * segments}" for segments in (1, 4, 16, 64, 256, 1024)]
        for facts in ("16 facts", "64 facts"):
            usual, large = (rows.get(f"{method} | {facts}{more}") for more in ("", ", large state"))
            assert (large is None) == (method in ("Slide", "GPT-2")) and usual.sizes["asked"] == ""
            if large:
                changed = [pair for pair in zip(usual.options.split(), large.options.split(), strict=True) if len({*pair}) == 2]
                assert [int(b) / int(a) for a, b in changed] == [4.0]


@pytest.mark.parametrize("name", TABLES)
def test_orderings_name_rows_and_measures(name):
    table = TABLES[name]
    rows, titles = {row.name for row in table.rows}, {m.title for m in table.measures}
    assert len(rows) == len(table.rows) and len(titles) == len(table.measures), "each name once"
    for ordering in table.orderings:
        for part in [*ordering.better.split(" - "), *ordering.worse.split(" - ")]:
            row, _, title = part.partition(" | ")
            assert row in rows and title in titles | {""}, f"{ordering.claim}: {part}"
        assert ordering.better != ordering.worse
    for scale in table.scales.values():
        for row in table.rows:
            for measured in table.measures:
                assert "{" not in filled(measured.report, row, scale)


def record_of(table, **measured):
    """A record of a table with given measures {row: [values by seed]} of its first measure."""
    title = table.measures[0].title
    rows = [
        {"name": row.name, "paper": row.paper, "options": row.options, "choice": "--rate 1", "tuning": {"--rate 1": 2.0},
         "parameters": 1234, "step_seconds": seconds, "measured": {title: measured[row.name]}}
        for row, seconds in zip(table.rows, ([0.5, 0.5, 0.5], [1.5, 2.5, 2.0]), strict=False)
    ]  # fmt: skip
    return {"name": "a-table", "scale": "small", "date": "2026-01-02", "machine": "2 cores", "torch": "2.13.0", "jobs": 2,
            "options": "--width 8", "first": "", "grid": ["--rate 1", "--rate 2"], "rows": rows}  # fmt: skip


TWO = Table(
    "A paper, Table 9", "What is it about? " * 20, (Row("a", "--x 1", "1.5"), Row("b", "--x 2", "2.5")), (CARRIED,),
    (Ordering("a is better", "a", "b"), Ordering("b gains", "b - a", "a")), {"small": Scale("--width 8")},
)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "expected"),
    [([0.1, 0.2, 0.01], "holds"), ([0.3, -0.1, 0.1], "holds within the spread"),
     ([0.1, -0.3, 0.1], "does not hold, within the spread"),
     ([-0.1, -0.2, -0.3], "does not hold"), ([0.0, 0.0, 0.0], "does not hold")],
)  # fmt: skip
def test_an_ordering_holds_if_all_seeds_agree(found, expected):
    assert verdict(found) == expected


def test_differences_are_worse_minus_better_seed_by_seed():
    record = record_of(TWO, a=[1.0, 2.0, 3.0], b=[1.5, 2.25, 2.0])
    first = CARRIED.title
    assert differences(record, Ordering("", "a", "b"), first) == [0.5, 0.25, -1.0]
    assert differences(record, Ordering("", f"b | {first}", "a"), first) == [-0.5, -0.25, 1.0]
    assert differences(record, Ordering("", "b - a", "a"), first) == [0.5, 1.75, 4.0]
    record["rows"][0]["measured"]["other"] = [9.0, 8.0, 7.0]
    assert differences(record, Ordering("", "b", "a | other"), first) == [7.5, 5.75, 5.0]


def test_step_times_are_of_1000_tokens_and_rows_take_turns(monkeypatch):
    """The clock says 2 s for the first row's step; the second reads twice as many tokens, half of the third's are not new."""
    turns = []

    def clock(variants, repeats, device):
        turns.append([variant.name for variant in variants])
        return {"0": [2.0] * repeats, "1": [6.0] * repeats, "2": [2.0] * repeats}

    monkeypatch.setattr("accelerated.experiments.table.time_in_turn", clock)
    options = "--model compressive --width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 1 --segment 8"
    overlapping = (
        "--model pretrained_recurrence --width 8 --heads 2 --feed-forward 8 --segment 8 --overlap 4 --horizon 1 --batch 5"
    )
    rows = [settings_of(Trial("", words)) for words in (f"{options} --batch 5", f"{options} --batch 10", overlapping)]
    assert [found[0] for found in step_times(rows)] == [50.0, 75.0, 100.0] and turns == [["0", "1", "2"]]


def test_a_page_has_means_spreads_verdicts_and_how_to_make_it_again():
    text = page(TWO, record_of(TWO, a=[1.0, 2.0, 3.0], b=[1.5, 2.25, 3.75]))
    for line in (
        "python -m accelerated.experiments a-table",
        "| a | 2.000 (1.000 .. 3.000) | 1.5 |", "| b | 2.500 (1.500 .. 3.750) | 2.5 |",
        "## Expected orderings", "| a is better | +0.500, +0.250, +0.750 | holds |", "a                        --x 1",
        "| a | 1,234 | 2,000 | 1.00 (1.00..1.00) | `--rate 1` |", "| b | 1,234 | 500 | 4.00 (3.00..5.00) | `--rate 1` |",
        "Measured on 2026-01-02, 2 cores, torch 2.13.0, 2 runs at a time.", "`--rate 1`, `--rate 2`",
    ):  # fmt: skip
        assert line in text, line
    assert max(map(len, text.splitlines())) <= 120 and text.endswith("```\n")
    record = record_of(TWO, a=[1.0], b=[2.0]) | {"scale": "gpu"}
    assert "--scale gpu" in page(TWO, record) and "(../index.md)" in page(TWO, record)
    ours = page(TWO, record | {"name": "memformer-1"})
    assert "## The paper's orderings" in ours and "[chapter](../memformer.md)" in ours
    for row in record["rows"]:
        del row["step_seconds"]
    text = page(TWO, record)
    assert "| b | 1,234 | `--rate 1` |" in text and "tokens/s" not in text and "took turns" not in text, "it was not timed"


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_short_lines_whatever_comes_out(name, monkeypatch):
    monkeypatch.setattr("accelerated.experiments.table.verdict", lambda differences: verdict([0.1, -0.3, 0.1]))  # the longest
    table = TABLES[name]
    scale = table.scales["small"]
    scale = scale._replace(sizes=scale.sizes | {"first": "x"})
    rows = [
        {"name": row.name, "paper": row.paper, "options": filled(row.options, row, scale), "choice": max(scale.grid, key=len),
         "tuning": {}, "parameters": 200_000, "step_seconds": [0.02, 0.03, 0.02],
         "measured": {m.title: [2.0, 2.5, 2.25] for m in table.measures}}
        for row in table.rows
    ]  # fmt: skip
    record = record_of(TWO, a=[1.0], b=[1.0]) | {"name": name, "rows": rows, "options": scale.options, "grid": list(scale.grid)}
    assert not [line for line in page(table, record).splitlines() if len(line) > 120]
    pictures = {name, "recall-distance"} if name == "recall" else {name} if table.draw else set()
    assert {*re.findall(r"\((\S+)\.svg\)", page(table, record))} == pictures, "all that are drawn"


def test_one_row_with_many_measures_is_a_table_of_measures():
    table = TWO._replace(
        rows=TWO.rows[:1], measures=(CARRIED, *(CARRIED._replace(title=f"m{n}") for n in range(4))), orderings=()
    )
    record = record_of(table, a=[1.0, 1.0, 1.0])
    record["rows"][0]["measured"] |= {f"m{n}": [float(n)] * 3 for n in range(4)}
    text = page(table, record)
    assert "| m3 | 3.000 |" in text and f"| {CARRIED.title} | 1.000 |" in text and "orderings" not in text


def test_a_difference_is_printed_as_its_measure():
    table = TWO._replace(measures=(CARRIED, CARRIED._replace(title="words", form=".2g")),
                         orderings=(Ordering("a is better at words", "a | words", "b | words"),))  # fmt: skip
    record = record_of(table, a=[1.0] * 3, b=[2.0] * 3)
    for row, words in zip(record["rows"], (1e9, 3.5e9), strict=True):
        row["measured"]["words"] = [words] * 3
    assert "| a is better at words | +2.5e+09, +2.5e+09, +2.5e+09 | holds |" in page(table, record)


def test_one_value_needs_no_spread():
    assert mean_and_spread([2.0, 2.0], ".1f") == "2.0" and mean_and_spread([1.0, 2.0], ".1f") == "1.5 (1.0 .. 2.0)"


def test_a_product_takes_one_of_each_grid():
    assert product(("--a 1", "--a 2"), ("--b 3", "--b 4")) == ("--a 1 --b 3", "--a 1 --b 4", "--a 2 --b 3", "--a 2 --b 4")


def test_unknown_names_and_scales_are_one_line(tmp_path):
    with pytest.raises(InputError, match="has no --scale gpu; give small"):
        measure("a-table", TWO, "gpu", Workshop(tmp_path, 1), tmp_path)
    command = [sys.executable, "-m", "accelerated.experiments", "memformer-9", "--runs", str(tmp_path / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and "nearest: memformer-" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_each_core_has_a_run_and_a_gpu_a_few(tmp_path):
    words = ["text", "--out", str(tmp_path), "--runs", str(tmp_path)]
    for more, expected in (([], os.cpu_count()), (["--scale", "gpu"], GPU_JOBS), (["--scale", "gpu", "--jobs", "3"], 3)):
        assert parse_options([*words, *more]).jobs == expected
    with pytest.raises(InputError, match="--jobs 0 must be at least 1"):
        parse_options([*words, "--jobs", "0"])


def test_a_small_table_from_the_command_to_the_page(tmp_path, monkeypatch):
    """Two rows with one choice each, one seed, trained and evaluated by the real scripts."""
    monkeypatch.setattr("accelerated.experiments.table.SEEDS", (0,))
    text = tmp_path / "text"
    text.write_text("".join(f"def f{n}(x):\n    return x + {n % 7}\n" for n in range(2000)))
    small = f"--data {text} --width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 1 --recurrent-layers none"
    small += " --batch 2 --steps 2 --warmup 1"
    first = Measure("training", lambda answer: answer["records"][0]["loss"])
    table = TWO._replace(
        rows=(Row("a", "--window {W} --segment {W}", sizes={"option": "--clear-memory"}), Row("b", "--window 8 --segment 8")),
        measures=(Measure("test", lambda answer: answer["bits_per_byte"], "score --split test {option}"), first),
        scales={"small": Scale(small, {"W": 8, "option": ""}, ("--learning-rate 0.01",))}, orderings=(Ordering("?", "a", "b"),),
    )  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measure("a-table", table, "small", Workshop(tmp_path / "runs", 2, say=lambda line: None), tmp_path)
    record = json.loads((tmp_path / "a-table.json").read_text())
    a, b = record["rows"]
    assert len(os.listdir(tmp_path / "runs")) == 1, "rows with the same options share a run"
    assert a["measured"]["training"] == b["measured"]["training"] and a["parameters"] == b["parameters"] > 0
    assert a["measured"]["test"][0] != b["measured"]["test"][0], "a is read with its memory cleared"
    assert a["options"] == "--window 8 --segment 8" and len(a["step_seconds"]) > 3
    assert (tmp_path / "a-table.md").read_text() == page(table, record)


@pytest.mark.parametrize("path", [path for path in RESULTS.glob("*.json") if path.stem in TABLES], ids=lambda path: path.stem)
def test_a_published_page_is_that_of_its_record_and_its_record_that_of_its_table(path):
    record = json.loads(path.read_text())
    table = TABLES[path.stem]
    scale = table.scales[record["scale"]]
    assert path.with_suffix(".md").read_text() == page(table, record)
    assert (record["options"], record["first"], record["grid"]) == (scale.options, scale.first, list(scale.grid))
    assert [(row["name"], row["options"], row["paper"]) for row in record["rows"]] == [
        (row.name, filled(row.options, row, scale), row.paper) for row in table.rows
    ]
    for row in record["rows"]:
        assert row["tuning"].keys() == set(scale.grid) and row["tuning"][row["choice"]] == min(row["tuning"].values())
        assert all(len(values) == 3 for values in row["measured"].values())
