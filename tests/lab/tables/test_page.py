"""A page says what was measured; an ordering is judged by an interval; published pages are those of their records."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from accelerated.lab.tables.notes import NOTES, draw, mean_of, sign_test, values_of
from accelerated.lab.tables.page import differences, mean_and_interval, mean_and_spread, page, share_of_gap, verdict
from accelerated.lab.tables.table import TABLES, Panel
from tests.helpers.programs import CARRIED, TWO, record_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"


@pytest.mark.parametrize(
    "by_seed, said",
    [
        ([0.029, 0.031, 0.030], "holds"),  # 0.030 ± 0.0025
        ([0.01, 0.02, 0.06], "cannot be told"),  # all agree, as they do by luck one time in four: 0.030 ± 0.066
        ([0.3, -0.1, 0.1], "cannot be told"),
        ([-0.029, -0.031, -0.030], "does not hold"),
        ([0.01, 0.02, 0.06, 0.03, 0.03], "holds"),  # five seeds: 0.030 ± 0.023
        ([0.0, 0.0, 0.0], "cannot be told"),
        ([0.5], "cannot be told"),
        ([math.inf] * 3, "holds"),  # the worse one always diverged
        ([-math.inf] * 3, "does not hold"),
        ([math.inf, 0.1, 0.1], "cannot be told"),
    ],
)
def test_an_ordering_is_judged_by_the_interval_of_its_mean_difference(by_seed, said):
    assert verdict(by_seed) == said


@pytest.mark.parametrize("seeds", [2, 3, 4, 5])
def test_an_interval_has_the_mean_19_times_in_20(seeds):
    draws = np.random.default_rng(seeds).normal(3.0, 2.0, (4000, seeds))
    inside = np.mean([abs(mean - 3.0) < half for mean, half in map(mean_and_interval, draws.tolist())])
    assert 0.94 < inside < 0.96


def test_differences_are_worse_minus_better_seed_by_seed():
    record = record_of(TWO, a=[1.0, 2.0, 3.0], b=[1.5, 2.25, 2.0])
    first = CARRIED.title
    assert differences(record, "a < b") == [0.5, 0.25, -1.0]
    assert differences(record, f"b @ {first} < a") == [-0.5, -0.25, 1.0]
    assert differences(record, "b - a < a") == [0.5, 1.75, 4.0]
    record["rows"][0]["measured"]["other"], record["rows"][1]["measured"]["other"] = [9.0, 8.0, 7.0], [10.0, 9.0, 9.0]
    assert differences(record, "b < a @ other") == [7.5, 5.75, 5.0]
    assert differences(record, "b - a @ other < a") == [0.0, 1.0, 1.0]
    assert differences(record, "other < b") == [-7.5, -5.75, -5.0], "of the first row"
    record["rows"][0]["measured"][first][1] = None
    assert values_of(record, "b - a") == [0.5, None, -1.0]


def test_rows_with_more_seeds_are_compared_on_those_that_both_have():
    record = record_of(TWO, a=[1.0, 2.0, 3.0, 4.0, 5.0], b=[1.5, 2.5, 3.5])
    assert differences(record, "a < b") == [0.5, 0.5, 0.5]
    text = page(TWO._replace(headline=["a"]), record)
    assert "Mean (least .. most) of seeds 0, 1, 2; 0 to 4 of a." in " ".join(text.split())
    assert "| a | 3.000 (1.000 .. 5.000) | 1.5 |" in text


def test_the_share_of_the_gap_is_how_far_a_row_goes_from_the_floor_to_the_ceiling():
    record = record_of(TWO, a=[3.0, 4.0, 5.0], b=[1.0, 2.0, 3.0])  # the gap is 2
    half = record["rows"][0] | {"name": "c", "measured": {CARRIED.title: [2.5, 3.0, 3.5]}}
    record["rows"].append(half)
    assert share_of_gap(record, ["a", "b"]) == {"a": "0%", "b": "100%", "c": "50%"}
    assert "| c | 3.000 (2.500 .. 3.500) | 50% |" in page(TWO._replace(gap=["a", "b"]), record)
    half["measured"] = {CARRIED.title: [3.0, 4.0, 5.1]}
    text = page(TWO._replace(gap=["a", "c"]), record)
    assert "c cannot be told from a: there is no gap" in text and "of the gap" not in text


def test_the_time_of_a_training_is_that_of_its_tokens():
    record = record_of(TWO, a=[1.0, 2.0, 3.0], b=[1.5, 2.5, 3.5])
    for row, passes in zip(record["rows"], ("1", "1.5"), strict=True):
        row["options"] += f" --epochs {passes}"
    assert "| 2,000 | 1.00 (1.00..1.00) | 1.00 |" in page(TWO, record)
    assert "| 500 | 4.00 (3.00..5.00) | 6.00 |" in page(TWO, record)


def test_a_page_says_how_it_was_measured_and_tuned():
    """What the published pages show, which are compared with their records, is not said again."""
    record = record_of(TWO, a=[1.0, None, 3.0], b=[1.5, 2.25, 3.75]) | {"grid": ["--rate 1", "--rate 2", "--rate 4"]}
    text = page(TWO, json.loads(json.dumps(record)))
    for line in (
        "Measured on 2026-01-02, 2 cores, torch 2.13.0, 2 runs at a time.",
        "| a | 1 of 3 diverged | 1.5 |",
        "| b | 2.500 (1.500 .. 3.750) | 2.5 |",
        "| a < b | -inf | cannot be told |",
        "| a | 1,234 | `--rate 1` | 2,000 | 1.00 (1.00..1.00) |",
        "| b | 1,234 | `--rate 1` | 500 | 4.00 (3.00..5.00) |",
        "a                        --x 1",
    ):
        assert line in text, line
    prose = " ".join(text.split())
    assert "Best at an end of the grid: a; b." in prose
    assert mean_of([1.0, None, 3.0]) == 2.0 and math.isnan(mean_of([None, None]))
    assert mean_and_spread([2.0, 2.0], ".1f") == "2.0" and mean_and_spread([0.5, 1.0], ".1%") == "75.0% (50.0 .. 100.0)"
    record["rows"][1]["choice"] = "--rate 2"
    assert "Best at an end of the grid: a." in " ".join(page(TWO, record).split())
    assert "on seed 0 by its colour, each" in " ".join(page(TWO, record | {"tuned_by": "its colour"}).split())
    assert "end of the grid" not in page(TWO, record | {"grid": ["--rate 1", "--rate 4"]}), "every choice is an end"
    for row in record["rows"]:
        del row["step_seconds"]
    assert "| b | 1,234 | `--rate 2` |\n" in page(TWO, record), "it was not timed"
    assert "No row was tuned" in page(TWO, record | {"grid": [""]})
    text = page(TWO, record | {"options": "--init FIRST --width 8 --width 9", "first": "--width 8 --long"})
    assert "all                      --init FIRST --width 9\nFIRST                    --width 8 --long\n" in text


def test_notes_are_counted_as_they_say():
    """Nothing beats a row for less; of n facts a model that knows k and guesses the others answers (n + k) / 2n.

    Of contexts the nearer ones are counted seed by seed; those that are as near count for neither.
    """

    def noted(name, **rows):
        return NOTES[name]({"rows": [{"name": row, "measured": own} for row, own in rows.items()]})

    points = {"T": (3, 2.0), "T / 2": (2, 2.1), "recurrent, T": (3, 1.9), "recurrent, T / 2": (2.5, 2.1)}
    titles = "FLOPs per token", "test, bits per byte"
    measured = {row: {t: [x - 1, x, x + 1] for t, x in zip(titles, own, strict=True)} for row, own in points.items()}
    assert noted("pareto", **measured).endswith("cheap ones first: T / 2; recurrent, T.")
    right = {"Slide: 2 facts": [1.0], "Slide: 64 facts": [0.5, 0.625], "GPT-2: 2 facts": [0.25], "GPT-2: 2 facts, large": [1.0]}
    lines = noted("facts known", **{row: {"right": own} for row, own in right.items()})
    assert lines.splitlines()[-2:] == ["| Slide | 8 |  |", "| GPT-2 | 0 | 2 |"]
    found = {"GPT-2": [[0.5, 0.5, 0.5, 0.25], None, [0.5, 0.1]], "recurrent": [[0.25, 0.5, 0.75, 0.1], [0.5], [0.1, 0.5]]}
    lines = noted("topics", **{row: {"divergences": own} for row, own in found.items()}).splitlines()
    assert lines[-2:] == ["| 0 | 2 | 1 | 66.7% | 1 |", "| 2 | 1 | 1 | 50.0% | 1 |"]
    assert sign_test(0, 10) == sign_test(10, 0) == 2 / 1024 and sign_test(5, 5) == sign_test(0, 0) == 1.0
    assert sign_test(1, 9) == 22 / 1024


def test_a_picture_has_a_line_of_means_for_each_name(monkeypatch, tmp_path):
    record, lines = record_of(TWO, a=[1.0, 3.0], b=[4.0, None]), []
    record["rows"][0]["measured"]["size"], record["rows"][1]["measured"]["size"] = [10.0, 20.0], [30.0, 40.0]
    real = __import__("matplotlib.axes").axes.Axes.plot
    monkeypatch.setattr(
        "matplotlib.axes.Axes.plot", lambda axes, x, y, *a, **k: lines.append((x, y, k)) or real(axes, x, y, *a, **k)
    )
    sides = {"1": "a", "1,024": "b"}
    table = TWO._replace(picture=[Panel("", "", sides, ["all"], guess="0.1"), Panel("", "", {"x": "*"}, ["a", "b"], "size")])
    draw(table, record, tmp_path / "drawn.svg")
    means = [(x, y, k["label"]) for x, y, k in lines]
    assert means == [([1, 1024], [2.0, 4.0], "all"), ([15.0], [2.0], "a"), ([35.0], [4.0], "b")]


@pytest.mark.parametrize("name", TABLES)
def test_a_published_page_is_that_of_its_record_and_its_record_that_of_its_table(name):
    record, table = json.loads((RESULTS / f"{name}.json").read_text()), TABLES[name]
    text = (RESULTS / f"{name}.md").read_text()
    assert text == page(table, record) and (f"({name}.svg)" in text) == bool(table.picture)
    assert (record["options"], record["first"], record["grid"]) == (table.options, table.first, table.grid)
    assert record.get("tuned_by", "its last validation") == table.tuned_by[1]
    assert [(row["name"], row["options"].strip(), row["paper"]) for row in record["rows"]] == [
        (label, row.options, row.paper) for label, row in table.rows.items()
    ]
    for row in record["rows"]:
        assert row["tuning"].keys() == set(table.grid) and row["tuning"][row["choice"]] == min(row["tuning"].values())
        assert [*row["measured"]] == [m.title for m in table.measures]
        seeds = 5 if row["name"] in table.headline else 3
        assert all(len(values) == seeds for values in row["measured"].values())


METHOD_OF = {  # as choosing.md calls them
    "compressive, 96 of 112 rows compressed": "compressive",
    "Transformer-XL, 112 rows": "Transformer-XL",
    "block_recurrent, 16 states": "block-recurrent",
    "the same without states (Slide)": "Slide",
    "memformer, 8 slots": "Memformer",
    "memorizing, 8 of 512 tokens": "Memorizing",
    "pretrained_recurrence, one vector": "recurrent GPT-2",
    "the same without it (GPT-2)": "GPT-2",
    "pretrained_recurrence, one vector, or without": "GPT-2",
}


def chosen(heading):
    """The rows of the first table below a heading of choosing.md, with their methods' names in the records."""
    text = (RESULTS.parent / "choosing.md").read_text().partition(f"## {heading}\n")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    ]
    return rows[0][1:], {METHOD_OF[name]: cells for name, *cells in rows[2:]}


def accuracies(name):
    """{method: {cell: right answers by seed}} of a record of the recall family."""
    right = {}
    for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
        method, _, asked = row["name"].partition(": ")
        right.setdefault(method, {})[asked] = row["measured"]["right"]
    return right


def test_what_choosing_says_is_what_was_measured():
    record, measured = json.loads((RESULTS / "methods.json").read_text()), {}
    for row in record["rows"]:
        bits = [f"{mean_of(values):.3f}" for values in row["measured"].values()]
        measured[row["name"]] = [*bits, f"{1000 / np.median(row['step_seconds']):,.0f}"]
    assert chosen("Better predictions of long text")[1] == measured
    measured = accuracies("recall-distance")
    distances, said = chosen("Facts from far back")
    assert said.keys() | {"recurrent GPT-2"} == measured.keys()
    for method, cells in said.items():
        for distance, cell in zip(distances, cells, strict=True):
            right = 100 * mean_of(measured[method][f"distance {distance}"])
            assert cell in (f"{right:.0f}%", f"{right:.1f}%"), (method, distance)
    assert measured["recurrent GPT-2"] == measured["GPT-2"], "they share a row"


def test_what_recall_says_of_other_tasks_is_what_was_measured():
    part = (RESULTS / "recall.md").read_text().partition("**What else.**")[2].partition("**By a preset.**")[0]
    columns, _, *lines = [re.split(r" *\| *", line)[1:-1] for line in part.splitlines() if line.startswith("|")]
    said = {method: cells for method, *cells in lines}
    links = re.findall(r"^- \*\*\[(.+)\]\((recall-.+)\.md\)\*\*", part, re.MULTILINE)  # a bullet for each column
    assert [title.lower() for title, _ in links] == columns[1:]
    tables = [name for _, name in links]
    assert {*tables} == {path.stem for path in RESULTS.glob("recall-*.json")} - {"recall-distance", "recall-capacity"}
    for at, name in enumerate(tables):
        measured = accuracies(name)
        right = {method: f"{100 * mean_of(*own.values()):.1f}" for method, own in measured.items()}
        assert {method: cells[at] for method, cells in said.items()} == right, name
