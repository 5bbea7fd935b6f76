"""A page says what was measured; an ordering is judged by an interval; published pages are those of their records."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from accelerated.lab.tables.notes import draw, mean_of, topics, values_of
from accelerated.lab.tables.page import differences, mean_and_interval, page, verdict
from accelerated.lab.tables.table import TABLES, Panel
from tests.helpers.programs import TWO, record_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def test_an_ordering_is_judged_by_the_interval_of_its_mean_difference():
    assert verdict([0.029, 0.031, 0.030]) == "holds", "0.030 ± 0.0025"
    assert verdict([0.01, 0.02, 0.06]) == "cannot be told", "all agree, as they do by luck one time in four: 0.030 ± 0.066"
    assert verdict([0.5]) == "cannot be told"
    assert verdict([math.inf] * 3) == "holds", "the worse one always diverged"
    assert verdict([-math.inf] * 3) == "does not hold"
    assert verdict([math.inf, 0.1, 0.1]) == "cannot be told"


@pytest.mark.parametrize("seeds", [2, 3, 4, 5])
def test_an_interval_has_the_mean_19_times_in_20(seeds):
    draws = np.random.default_rng(seeds).normal(3.0, 2.0, (4000, seeds))
    inside = np.mean([abs(mean - 3.0) < half for mean, half in map(mean_and_interval, draws.tolist())])
    assert 0.94 < inside < 0.96


def test_differences_are_worse_minus_better_seed_by_seed():
    """Of the seeds that both rows have, if one has more; a side is of the first measure, or of the first row."""
    record = record_of(TWO, a=[1.0, None, 3.0, 4.0], b=[1.5, 2.25, 2.0])
    for row, other in zip(record["rows"], ([9.0, 8.0, 7.0], [10.0, 9.0, 9.0]), strict=True):
        row["measured"]["other"] = other
    assert differences(record, "a < b") == [0.5, -math.inf, -1.0]
    assert differences(record, "b < a @ other") == [7.5, 5.75, 5.0]
    assert differences(record, "b - a @ other < other") == [8.0, 7.0, 5.0]
    assert values_of(record, "b - a") == [0.5, None, -1.0]


def test_a_page_says_what_diverged_what_was_not_timed_and_what_was_not_tuned():
    """What the published pages show, which are compared with their records, is not said again."""
    record = record_of(TWO, a=[1.0, None, 3.0, 4.0], b=[1.5, 2.25, 3.75]) | {"grid": ["--rate 1", "--rate 2", "--rate 4"]}
    text = " ".join(page(TWO._replace(headline=["a"]), record).split())
    assert "| a | 1 of 4 diverged | 1.5 |" in text and "| a < b | -inf | cannot be told |" in text
    assert "of seeds 0, 1, 2; 0 to 4 of a." in text and "Best at an end of the grid: a; b." in text
    assert "end of the grid" not in page(TWO, record | {"grid": ["--rate 1", "--rate 4"]}), "every choice is an end"
    for row, passes in zip(record["rows"], ("2", "3"), strict=True):
        row["options"] += f" --epochs {passes}"
    assert "| 500 | 4.00 (3.00..5.00) | 6.00 |" in page(TWO, record), "of half as many tokens again"
    for row in record["rows"]:
        del row["step_seconds"]
    assert "| b | 1,234 | `--rate 1` |\n" in page(TWO, record), "it was not timed"
    assert "No row was tuned" in page(TWO, record | {"grid": [""]})


def test_a_run_that_diverged_has_no_row_among_the_topics():
    found = {"GPT-2": [[0.5, 0.5, 0.25], None, [0.5, 0.1]], "recurrent": [[0.25, 0.75, 0.1], [0.5], [0.1, 0.5]]}
    rows = [{"name": name, "measured": {"divergences": own}} for name, own in found.items()]
    assert topics({"rows": rows}).splitlines()[-2:] == ["| 0 | 2 | 1 | 66.7% | 1 |", "| 2 | 1 | 1 | 50.0% | 1 |"]


def test_a_picture_has_a_line_of_means_for_each_name(monkeypatch, tmp_path):
    """Of the seeds that did not diverge."""
    record, lines = record_of(TWO, a=[1.0, 3.0], b=[4.0, None]), []
    for row, sizes in zip(record["rows"], ([10.0, 20.0], [30.0, 40.0]), strict=True):
        row["measured"]["size"] = sizes
    axes = pytest.importorskip("matplotlib.axes", reason="drawing needs the extra plot: matplotlib").Axes
    plot = axes.plot
    monkeypatch.setattr(axes, "plot", lambda self, x, y, **how: lines.append((x, y, how["label"])) or plot(self, x, y, **how))
    sides = {"1": "a", "1,024": "b"}
    table = TWO._replace(picture=[Panel("", "", sides, ["all"], guess="0.1"), Panel("", "", {"x": "*"}, ["a", "b"], "size")])
    draw(table, record, tmp_path / "drawn.svg")
    assert lines == [([1, 1024], [2.0, 4.0], "all"), ([15.0], [2.0], "a"), ([35.0], [4.0], "b")]
    assert math.isnan(mean_of([None, None]))


@pytest.mark.parametrize("name", TABLES)
def test_a_published_page_is_that_of_its_record_and_its_record_that_of_its_table(name, tmp_path):
    """Its picture can be drawn."""
    record, table = json.loads((RESULTS / f"{name}.json").read_text()), TABLES[name]
    text = (RESULTS / f"{name}.md").read_text()
    assert text == page(table, record) and (f"({name}.svg)" in text) == bool(table.picture)
    if table.picture:
        draw(table, record, tmp_path / "drawn.svg")
    assert (record["options"], record["first"], record["grid"]) == (table.options, table.first, table.grid)
    assert record.get("tuned_by", "its last validation") == table.tuned_by[1]
    assert [(row["name"], row["options"].strip(), row["paper"]) for row in record["rows"]] == [
        (label, row.options, row.paper) for label, row in table.rows.items()
    ]
    for row in record["rows"]:
        assert row["tuning"].keys() == set(table.grid) and row["tuning"][row["choice"]] == min(row["tuning"].values())
        seeds = 5 if row["name"] in table.headline else 3
        measured = {title: len(values) for title, values in row["measured"].items()}
        assert [*measured.items()] == [(m.title, seeds) for m in table.measures]


def table_below(page, heading):
    """(head, rows) of the first table below a heading; the rows are in the order of the record."""
    text = page.read_text().partition(heading)[2]
    head, _, *rows = (re.split(r" *\| *", line)[1:-1] for line in re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines())
    return head, rows


def accuracies(name):
    """{method: {cell: the mean share of right answers}} of a record of the recall family."""
    right = {}
    for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
        method, _, asked = row["name"].partition(": ")
        right.setdefault(method, {})[asked] = mean_of(row["measured"]["right"])
    return right


def test_what_choosing_says_is_what_was_measured():
    page, measured = RESULTS.parent / "choosing.md", accuracies("recall-distance")
    rows = table_below(page, "## Better predictions of long text\n")[1]
    for (_, *cells), row in zip(rows, json.loads((RESULTS / "methods.json").read_text())["rows"], strict=True):
        bits = [f"{mean_of(values):.3f}" for values in row["measured"].values()]
        assert cells == [*bits, f"{1000 / np.median(row['step_seconds']):,.0f}"], row["name"]
    assert measured.pop("recurrent GPT-2") == measured["GPT-2"], "they share a row"
    (_, *distances), rows = table_below(page, "## Facts from far back\n")
    for (_, *cells), (method, own) in zip(rows, measured.items(), strict=True):
        for distance, cell in zip(distances, cells, strict=True):
            right = 100 * own[f"distance {distance}"]
            assert cell in (f"{right:.0f}%", f"{right:.1f}%"), (method, distance)


def test_what_recall_says_of_changes_is_what_was_measured():
    right = accuracies("recall-rewriting")
    for methods, percent in table_below(RESULTS / "recall.md", "**[Change]")[1]:
        assert {f"{100 * right.pop(method)['rewriting']:.1f}" for method in methods.split(", ")} == {percent}, methods
    assert not right, "a method is not on the page"
