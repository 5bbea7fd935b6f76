"""A page says what was measured; an ordering is judged seed by seed; published pages are those of their records."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from rehearsal import TWO, record_of

from accelerated.data.recall import GOES, TAKES, RecallDocuments
from accelerated.lab.tables.__main__ import TABLES
from accelerated.lab.tables.measure import write_page
from accelerated.lab.tables.page import (
    cost,
    differences,
    mean_and_spread,
    mean_of,
    names_and_rows,
    page,
    settings_part,
    shared_name,
    speed,
    verdict,
)
from accelerated.lab.tables.pretrained_recurrence import DIVERGENCES
from accelerated.lab.tables.recall import RECALL, TASKS, accuracies
from accelerated.lab.tables.table import CARRIED, CLEARED, Ordering, Scale, filled, shown

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    ("found", "expected"),
    [([0.1, 0.2, 0.01], "holds"), ([0.3, -0.1, 0.1], "within the spread (2 of 3)"),
     ([0.1, -0.3, 0.1], "does not hold (2 of 3)"), ([0.3, -0.1, -0.1], "does not hold (1 of 3)"),
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


def test_a_page_has_means_spreads_verdicts_and_how_to_make_it_again():
    text = page(TWO, record_of(TWO, a=[1.0, 2.0, 3.0], b=[1.5, 2.25, 3.75]))
    for line in (
        "python -m accelerated.lab.tables a-table",
        "| a | 2.000 (1.000 .. 3.000) | 1.5 |", "| b | 2.500 (1.500 .. 3.750) | 2.5 |",
        "## Expected orderings", "| a is better | +0.500, +0.250, +0.750 | holds |", "a                        --x 1",
        "| a | 1,234 | 2,000 | 1.00 (1.00..1.00) | `--rate 1` |", "| b | 1,234 | 500 | 4.00 (3.00..5.00) | `--rate 1` |",
        "Measured on 2026-01-02, 2 cores, torch 2.13.0, 2 runs at a time.", "`--rate 1`, `--rate 2`",
    ):  # fmt: skip
        assert line in text, line
    assert max(map(len, text.splitlines())) <= 120 and text.endswith("```\n")
    assert "log.md" not in text
    record = record_of(TWO, a=[1.0], b=[2.0]) | {"scale": "gpu"}
    assert "--scale gpu" in page(TWO, record) and "(../index.md)" in page(TWO, record)
    ours = page(TWO, record | {"name": "memformer-1"})
    assert "## The paper's orderings" in ours and "[chapter](../memformer.md)" in ours
    for row in record["rows"]:
        del row["step_seconds"]
    text = page(TWO, record)
    assert "| b | 1,234 | `--rate 1` |" in text and "tokens/s" not in text and "took turns" not in text, "it was not timed"


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_short_lines_whatever_comes_out(name, monkeypatch, tmp_path):
    monkeypatch.setattr("accelerated.lab.tables.page.verdict", lambda differences: verdict([0.3, -0.1, 0.1]))  # the longest

    def measured(m):
        return [[0.5, 0.25]] * 3 if m.title == DIVERGENCES else [2.0, 2.5, 2.25]

    table = TABLES[name]
    scale = shown(table.scales["small"])
    rows = [
        {"name": row.name, "paper": row.paper, "options": filled(row.options, row, scale), "choice": scale.grid[-1],
         "tuning": dict.fromkeys(scale.grid, 2.0), "parameters": 200_000, "step_seconds": [0.02, 0.03, 0.02],
         "measured": {m.title: measured(m) for m in table.measures}}
        for row in table.rows
    ]  # fmt: skip
    record = record_of(TWO, a=[1.0], b=[1.0]) | {"name": name, "rows": rows, "options": scale.options, "grid": list(scale.grid)}
    assert not [line for line in page(table, record).splitlines() if len(line) > 120]
    record["rows"][0]["measured"] = {
        m.title: [None if seed == 1 else v for seed, v in enumerate(measured(m))] for m in table.measures
    }
    (tmp_path / f"{name}.json").write_text(json.dumps(record))
    if table.draw:
        table.draw(record, tmp_path / f"{table.picture or name}.svg")
    pictures = {table.picture or name} if table.draw else set()
    assert {*re.findall(r"\((\S+)\.svg\)", page(table, record))} == pictures
    drawn = pictures | ({"recall"} if name in RECALL else set())
    assert {file.stem for file in tmp_path.glob("*.svg")} == drawn, "what a page shows is drawn"
    gpu = tmp_path / "gpu"
    gpu.mkdir()
    write_page(name, table, record | {"scale": "gpu"}, gpu)
    assert {file.name for file in gpu.iterdir()} == {f"{name}-gpu.json", f"{name}-gpu.md", *(f"{own}-gpu.svg" for own in drawn)}
    seen = re.findall(r"\((\S+)\.svg\)", (gpu / f"{name}-gpu.md").read_text())
    assert seen == [f"{own}-gpu" for own in pictures], "of its own scale"


def test_a_page_says_which_rows_did_best_at_an_end_of_the_grid():
    record = record_of(TWO, a=[1.0], b=[2.0]) | {"grid": ["--rate 1", "--rate 2", "--rate 4"]}
    a, b = record["rows"]
    a["tuning"] = {"--rate 1": 2.0, "--rate 2": 2.25, "--rate 4": 3.0}
    b |= {"choice": "--rate 2", "tuning": {"--rate 1": 2.5, "--rate 2": 2.25, "--rate 4": 3.0}}
    assert "validation text: a (0.250)." in " ".join(page(TWO, record).split())
    b |= {"choice": "--rate 4", "tuning": {"--rate 1": 3.5, "--rate 2": 3.25, "--rate 4": 2.75}}
    assert "validation text: a (0.250), b (0.500)." in " ".join(page(TWO, record).split())
    by = " ".join(page(TWO, record | {"tuned_by": "its colour"}).split())
    assert "on seed 0 by its colour, each" in by and "next choice in bits per byte: a (0.250)" in by
    assert "on seed 0 by its last validation, each" in " ".join(page(TWO, record).split())
    assert "end of the grid" not in page(TWO, record | {"grid": ["--rate 1", "--rate 2"]}), "every choice is an end"
    assert "end of the grid" not in page(TWO, record | {"grid": [f"--rate {n} --size {n}" for n in (1, 2, 3)]})


def test_rows_that_are_one_model_stand_together():
    """Where settings and costs are listed; each keeps its own results."""
    record = record_of(TWO, a=[1.0], b=[2.0])
    for row, name in zip(record["rows"], ("short of 1", "short of 2 or 3"), strict=True):
        row |= {"name": name, "options": "--same 1"}
    names, rows = names_and_rows(record)
    assert names == ["short of 1 .. 2 or 3"] and rows == record["rows"][:1]
    text = cost(record) + settings_part(record)
    assert text.count("short of 1 .. 2 or 3 ") == 2 and text.count("--same 1") == 1 and text.count("1,234") == 1
    assert shared_name("a", "a b") == "a .. b" and shared_name("a b", "a b") == "a b"


def test_a_run_that_diverged_is_said_to_have():
    record = record_of(TWO, a=[1.0, None, 3.0], b=[1.5, 2.25, 3.75])
    text = page(TWO, json.loads(json.dumps(record)))
    assert "do not hold is in the [log](log.md)" in text.replace("\n", " ")
    assert "| a | 1 of 3 diverged | 1.5 |" in text and "| a is better | +0.500, -inf, +0.750 | does not hold (2 of 3) |" in text
    assert mean_of([1.0, None, 3.0]) == 2.0 and math.isnan(mean_of([None, None]))


def test_rows_without_a_grid_are_not_said_to_be_tuned():
    text = page(TWO, record_of(TWO, a=[1.0], b=[2.0]) | {"grid": [""]})
    assert "No row was tuned" in text and "| b | 1,234 | 500 | 4.00 (3.00..5.00) |" in text and "tuned |" not in text


def test_a_page_names_the_first_run_and_fills_the_sizes():
    scale = Scale("--init {first} --width {W}", {"W": 8}, first="--width {W} --long")
    record = record_of(TWO, a=[1.0], b=[2.0]) | {"options": shown(scale).options, "first": shown(scale).first}
    text = page(TWO, record)
    assert (
        "all      --init FIRST --width 8\nFIRST    --width 8 --long\n" in text and "FIRST is the run that all begin from." in text
    )


def test_settings_show_the_last_of_an_option_alone():
    record = record_of(TWO, a=[1.0], b=[2.0])
    record["rows"][0]["options"] = "--x 1 --flag --x 3"
    assert "\na                        --x 3 --flag\n" in page(TWO, record)


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


@pytest.mark.parametrize("path", [path for path in RESULTS.glob("*.json") if path.stem in TABLES], ids=lambda path: path.stem)
def test_a_published_page_is_that_of_its_record_and_its_record_that_of_its_table(path):
    record = json.loads(path.read_text())
    table = TABLES[path.stem]
    scale = shown(table.scales[record["scale"]])
    assert path.with_suffix(".md").read_text() == page(table, record)
    assert (record["options"], record["first"], record["grid"]) == (scale.options, scale.first, list(scale.grid))
    assert [(row["name"], row["options"], row["paper"]) for row in record["rows"]] == [
        (row.name, filled(row.options, row, scale), row.paper) for row in table.rows
    ]
    for row in record["rows"]:
        assert row["tuning"].keys() == set(scale.grid) and row["tuning"][row["choice"]] == min(row["tuning"].values())
        assert all(len(values) == 3 for values in row["measured"].values())


METHOD_OF = {  # as choosing.md calls them
    "compressive, 96 of 112 rows compressed": "compressive", "Transformer-XL, 112 rows": "Transformer-XL",
    "block_recurrent, 16 states": "block-recurrent", "the same without states (Slide)": "Slide",
    "memformer, 8 slots": "Memformer", "memorizing, 8 of 512 tokens": "Memorizing",
    "pretrained_recurrence, one vector": "recurrent GPT-2", "the same without it (GPT-2)": "GPT-2",
    "pretrained_recurrence, one vector, or without": "GPT-2",
}  # fmt: skip


def chosen(heading):
    """The rows of the first table below a heading of choosing.md, with their methods' names in the records."""
    text = (RESULTS.parent / "choosing.md").read_text().partition(f"## {heading}\n")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    ]
    return rows[0][1:], {METHOD_OF[name]: cells for name, *cells in rows[2:]}


def test_what_choosing_says_of_text_is_what_was_measured():
    record = json.loads((RESULTS / "methods.json").read_text())
    _, said = chosen("Better predictions of long text")
    measured = {}
    for row in record["rows"]:
        bits = [f"{mean_of(row['measured'][m.title]):.3f}" for m in (CARRIED, CLEARED)]
        measured[row["name"]] = [*bits, speed(row, record["rows"][0])[0]]
    assert said == measured


def test_what_choosing_says_of_distances_is_what_was_measured():
    measured = accuracies(json.loads((RESULTS / "recall-distance.json").read_text()))
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
        measured = accuracies(json.loads((RESULTS / f"{name}.json").read_text()))
        right = {method: f"{100 * mean_of(*own.values()):.1f}" for method, own in measured.items()}
        assert {method: cells[at] for method, cells in said.items()} == right, name


def named_blindly(label):
    """How often the place that was named last, and that of who took something last, is right in a task's test split."""
    documents, right = RecallDocuments(TASKS[label], "test"), []
    for document in map(documents.__getitem__, range(len(documents))):
        text, answers, place_of, taker = document.inputs.tolist(), document.targets[document.scored], {}, None
        for person, verb, thing in zip(text, text[1:], text[2:], strict=False):
            if verb == GOES:
                place_of[person] = last = thing
            taker = person if verb == TAKES else taker
        right.append([(answers == place).mean() for place in (last, place_of.get(taker))])
    return [f"{100 * mean:.1f}" for mean in np.mean(right, 0)]


def test_what_recall_says_of_places_that_are_named_blindly_is_so():
    text = " ".join((RESULTS / "recall.md").read_text().split())
    [one, two] = re.findall(r"the place that was named last,? .*?right in (\S+)%", text)
    [taker] = re.findall(r"the place of whoever took something last in (\S+)%", text)
    assert [one] == named_blindly("bAbI 1")[:1] and [two, taker] == named_blindly("bAbI 2")
