"""A table's page says what was measured; an ordering is judged seed by seed; rows differ only in what the table is about."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import Rehearsal

from accelerated.experiments.__main__ import GPU_JOBS, TABLES, parse_options
from accelerated.experiments.measure import measure, settings_of, step_times, train_rows
from accelerated.experiments.page import (
    cost,
    differences,
    mean_and_spread,
    mean_of,
    names_and_rows,
    page,
    settings_part,
    shared_name,
    verdict,
)
from accelerated.experiments.table import CARRIED, Measure, Ordering, Row, Scale, Table, filled, shown
from accelerated.experiments.tables import compressive, memformer, pretrained_recurrence
from accelerated.experiments.tables.compressive import RECORDINGS
from accelerated.experiments.tables.pretrained_recurrence import DIVERGENCES, TOPICS, sign_test
from accelerated.experiments.tables.recall import (
    CAPACITY,
    DISTANCE,
    METHODS,
    RECALL,
    RIGHT,
    TASKS,
    documents_to_read,
    draw_family,
)
from accelerated.experiments.trials import Trial, Workshop, join, product
from accelerated.program.errors import InputError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
BEGUN = re.compile(r"--init \S+")
EVERY = [(name, scale) for name, table in TABLES.items() for scale in table.scales]


def row_settings(name, scale_name, row):
    """The Settings of a row as it is trained, of a row that begins from another run without its weights."""
    table, scale = TABLES[name], TABLES[name].scales[scale_name]
    scale = shown(scale)
    options = filled(join(scale.options, row.options), row, scale)
    if BEGUN.search(options):
        options = join(filled(scale.first, row, scale), BEGUN.sub("", options))
    return settings_of(Trial(row.name, join(options, scale.grid[0]))), table


@pytest.fixture(autouse=True)
def recordings(tmp_path_factory, monkeypatch):
    """The folder in which one table finds its speech."""
    monkeypatch.chdir(tmp_path_factory.mktemp("recordings"))
    RECORDINGS.mkdir(parents=True)


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_all_rows_can_be_trained_and_read_as_many_tokens(name, scale):
    """In an update; the methods of the recall family, which are trained in different ways, as many documents in all."""
    tokens = {}
    for row in TABLES[name].rows:
        settings, _ = row_settings(name, scale, row)
        training = settings.training
        segment = settings.model_config.segment
        tokens[row.name] = training.batch * training.horizon * segment
        if name in RECALL:
            documents = training.batch * training.horizon * training.steps / -(-settings.recall.length // segment)
            tokens[row.name] = round(documents / documents_to_read(settings.recall), 2)
    assert len(set(tokens.values())) == 1, tokens


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_rows_of_a_table_train_as_long_on_the_same_text(name, scale):
    """Not those of the table that is about the text, of that about the rate, and of the recall family."""
    alike = ("steps", "optimizer", "warmup", "clip", "dtype", "seed", "weight_decay")
    found = [row_settings(name, scale, row)[0] for row in TABLES[name].rows]
    assert len({(s.data, *(getattr(s.training, field) for field in alike)) for s in found}) == 1 or name in (
        *("text", "compressive-3"),
        *RECALL,
    )


def test_a_task_of_the_recall_family_is_what_its_options_give():
    """Whatever the preset of a model says: each has a recall task of its own."""
    found = set()
    for name in RECALL:
        for row in TABLES[name].rows:
            label = row.name.partition(": ")[2].removesuffix(", large state")
            config = (TASKS | CAPACITY).get(label, DISTANCE)
            assert row_settings(name, "small", row)[0].recall == config, row.name
            found.add(config)
    assert found == {DISTANCE, *TASKS.values(), *CAPACITY.values()}


def test_a_cell_of_the_recall_family_asks_at_its_distance_and_a_large_state_holds_four_times_as_much():
    rows = {row.name: row for name in RECALL for row in TABLES[name].rows}
    for method in METHODS:
        asked = [row.sizes["asked"] for name, row in rows.items() if name.startswith(f"{method}: distance ")]
        assert asked == [f"--recall-distance {16 * segments}" for segments in (1, 4, 16, 64, 256, 1024)]
        for facts in ("16 facts", "64 facts"):
            usual, large = (rows.get(f"{method}: {facts}{more}") for more in ("", ", large state"))
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


def test_step_times_are_of_1000_tokens_and_rows_take_turns(monkeypatch):
    """The clock says 2 s for the first row's step. The second reads twice as many tokens, as does the fourth, in two segments;
    half of the third's are not new."""
    turns = []

    def clock(variants, repeats, device):
        turns.append([variant.name for variant in variants])
        return {"0": [2.0] * repeats, "1": [6.0] * repeats, "2": [2.0] * repeats, "3": [4.0] * repeats}

    monkeypatch.setattr("accelerated.experiments.measure.time_in_turn", clock)
    options = "--model compressive --width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 1 --segment 8"
    overlapping = (
        "--model pretrained_recurrence --width 8 --heads 2 --feed-forward 8 --segment 8 --overlap 4 --horizon 1 --batch 5"
    )
    replayed = f"{options} --batch 5 --horizon 2"
    rows = [f"{options} --batch 5", f"{options} --batch 10", overlapping, replayed, f"{options} --batch 5"]
    found = step_times([settings_of(Trial("", words)) for words in rows])
    assert [of_row[0] for of_row in found] == [50.0, 75.0, 100.0, 50.0, 50.0]
    assert turns == [["0", "1", "2", "3"]], "the same settings once"


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
def test_a_page_has_short_lines_whatever_comes_out(name, monkeypatch, tmp_path):
    monkeypatch.setattr("accelerated.experiments.page.verdict", lambda differences: verdict([0.3, -0.1, 0.1]))  # the longest

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
        table.draw(record, tmp_path / f"{name}.svg")
    pictures = {name} if table.draw else set()
    assert {*re.findall(r"\((\S+)\.svg\)", page(table, record))} == pictures
    drawn = pictures | ({"recall"} if name in RECALL else set())
    assert {file.stem for file in tmp_path.glob("*.svg")} == drawn, "what a page shows is drawn"


def test_the_picture_of_recall_has_the_cells_of_all_its_tables(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(
        "accelerated.experiments.tables.recall.draw_accuracies", lambda found, path: drawn.append((found, path.name))
    )
    for name, asked in (("recall-tasks", "copying"), ("recall-distance", "distance 1")):
        rows = [{"name": f"{m}: {asked}", "measured": {RIGHT.title: [0.5]}} for m in ("Slide", "GPT-2")]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    draw_family(tmp_path)
    own = {"distance 1": [0.5], "copying": [0.5]}
    assert drawn == [({"Slide": own, "GPT-2": own}, "recall.svg")] and list(drawn[0][0]["Slide"]) == list(own)


def test_the_share_of_contexts_that_are_nearer_is_counted_seed_by_seed():
    """Those that are as near count for neither."""
    divergences = {"GPT-2": [[0.5, 0.5, 0.5, 0.25], None, [0.5, 0.1]], "recurrent": [[0.25, 0.5, 0.75, 0.1], [0.5], [0.1, 0.5]]}
    rows = [
        {"name": name, "measured": {TOPICS.measures[0].title: [0.5, None, 0.25], DIVERGENCES: own}}
        for name, own in divergences.items()
    ]
    lines = TOPICS.results(TOPICS, {"rows": rows}).splitlines()
    assert lines[-2:] == ["| 0 | 2 | 1 | 66.7% | 1 |", "| 2 | 1 | 1 | 50.0% | 1 |"] and "| GPT-2 | 1 of 3 diverged |" in lines
    assert sign_test(0, 10) == sign_test(10, 0) == 2 / 1024 and sign_test(5, 5) == sign_test(0, 0) == 1.0
    assert sign_test(1, 9) == 22 / 1024


def test_a_page_says_which_rows_did_best_at_an_end_of_the_grid():
    record = record_of(TWO, a=[1.0], b=[2.0]) | {"grid": ["--rate 1", "--rate 2", "--rate 4"]}
    a, b = record["rows"]
    a["tuning"] = {"--rate 1": 2.0, "--rate 2": 2.25, "--rate 4": 3.0}
    b |= {"choice": "--rate 2", "tuning": {"--rate 1": 2.5, "--rate 2": 2.25, "--rate 4": 3.0}}
    assert "validation text: a (0.250)." in " ".join(page(TWO, record).split())
    b |= {"choice": "--rate 4", "tuning": {"--rate 1": 3.5, "--rate 2": 3.25, "--rate 4": 2.75}}
    assert "validation text: a (0.250), b (0.500)." in " ".join(page(TWO, record).split())
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
    assert "| a | 1 of 3 diverged | 1.5 |" in text and "| a is better | +0.500, -inf, +0.750 | does not hold (2 of 3) |" in text
    assert mean_of([1.0, None, 3.0]) == 2.0 and math.isnan(mean_of([None, None]))


def test_rows_without_a_grid_are_not_said_to_be_tuned():
    text = page(TWO, record_of(TWO, a=[1.0], b=[2.0]) | {"grid": [""]})
    assert "No row was tuned" in text and "| b | 1,234 | 500 | 4.00 (3.00..5.00) |" in text and "tuned |" not in text


def test_rows_are_trained_with_their_own_choice_and_all_seeds(tmp_path):
    """From a first run that is trained before them."""
    shop = Rehearsal(tmp_path, loss={"--x 1 --rate 2": 0.5, "--x 2 --rate 1": 0.25})
    scale = Scale("--init {first} --width {W}", {"W": 8}, ("--rate 1", "--rate 2"), first="--width {W} --long")
    chosen, trials = train_rows(TWO, scale, shop)
    first = shop.folder(Trial("", "--width 8 --long"))
    assert first.exists() and "--init" not in shop.calls[0]
    assert {name: choice for name, (choice, _) in chosen.items()} == {"a": "--rate 2", "b": "--rate 1"}
    assert chosen["a"][1] == {"--rate 1": 1.0, "--rate 2": 0.5}
    for name, own in {"a": "--x 1 --rate 2", "b": "--x 2 --rate 1"}.items():
        assert trials[name] == [Trial(name, f"--init {first} --width 8 {own}", seed) for seed in (0, 1, 2)]
        assert all(shop.folder(trial).exists() for trial in trials[name])


def test_a_page_names_the_first_run_and_fills_the_sizes():
    scale = Scale("--init {first} --width {W}", {"W": 8}, first="--width {W} --long")
    record = record_of(TWO, a=[1.0], b=[2.0]) | {"options": shown(scale).options, "first": shown(scale).first}
    text = page(TWO, record)
    assert (
        "all      --init FIRST --width 8\nFIRST    --width 8 --long\n" in text and "FIRST is the run that all begin from." in text
    )


ATTENTION = {"memory": {"mean": [0.5, 0.25, 0.125, 0.0625, 0.03, 0.02]}, "segment": {"mean": [0.01] * 6}}
POSITIONS = {"memory_carried": [{"start": 64, "bits_per_byte": 2.5}, {"start": 128, "bits_per_byte": 2.25}], "memory_cleared": []}
OTHERS = {"bits_per_byte": 3.0, "word_perplexity": 8.0}
WINDOWS = {"splits": {"test": {"bits_per_byte": 2.5, "word_perplexity": 9.0}, "valid": OTHERS},
           "counted_flops_per_token": 7e6, "flops_per_token": 6e6}  # fmt: skip
LOSSES = [{"loss": 1, "bits_per_byte": bits} for bits in (9.0, 9.0, 3.0, 2.0)] + [{"final": True, "bits_per_byte": 0.0}]


@pytest.mark.parametrize(
    ("found", "answer", "expected"),
    [
        (CARRIED, {"bits_per_byte": 2.5}, 2.5),
        (memformer.PERPLEXITY, {"perplexity": 7.0, "bits_per_byte": 2.5}, 7.0),
        (compressive.bucket("all"), {"by_frequency": [{"name": "rare", "perplexity": 9}, {"name": "all", "perplexity": 5}]}, 5),
        (compressive.attention_to("memory", 1), {"attention": ATTENTION}, 25.0),
        (compressive.loss_of_layer(1), {"attention_reconstruction_loss": [0.5, 0.25]}, 0.25),
        (compressive.position(128), {"by_position": POSITIONS}, 2.25),
        (compressive.FIGURE_3.measures[0], {"records": LOSSES}, 2.5),
        (pretrained_recurrence.MEASURES[0], {"rows": [WINDOWS]}, 2.5),
        (pretrained_recurrence.MEASURES[1], {"rows": [WINDOWS]}, 9.0),
        (pretrained_recurrence.MEASURES[2], {"rows": [WINDOWS]}, 7e6),
        (RIGHT, {"accuracy": 0.5, "bits_per_byte": 1.0}, 0.5),
    ],
    ids=lambda value: getattr(value, "title", ""),
)  # fmt: skip
def test_a_measure_is_what_its_title_says(found, answer, expected):
    assert found.pick(answer) == expected


def test_overlaps_are_the_nearest_to_those_of_the_papers_windows():
    names = ("o0", "o5", "o10", "o30", "o50", "o75", "o100", "o150", "o200")
    for window, expected in {300: (0, 5, 10, 30, 50, 75, 100, 150, 200), 60: (0, 1, 2, 6, 10, 15, 20, 30, 40),
                             16: (0, 1, 1, 2, 3, 4, 5, 8, 11)}.items():  # fmt: skip
        assert pretrained_recurrence.overlaps_of_window(window) == dict(zip(names, expected, strict=True))


def test_settings_show_the_last_of_an_option_alone():
    record = record_of(TWO, a=[1.0], b=[2.0])
    record["rows"][0]["options"] = "--x 1 --flag --x 3"
    assert "\na                        --x 3 --flag\n" in page(TWO, record)


def test_figure_3a_is_measured_on_the_validations_of_a_log():
    bits = {25: 3.0, 50: 2.0, 75: 2.5, 100: 4.5}
    records = [{"step": 25, "loss": 1.0}, *({"step": n, "validation_bits_per_byte": b} for n, b in bits.items())]
    records.append({"step": 100, "validation_bits_per_byte": 4.5, "final": True})
    best, last_above_best, rough, *points = (m.pick({"records": records}) for m in memformer.FIGURE_3A.measures[:7])
    assert (best, last_above_best, points) == (2.0, 2.5, [3.0, 2.0, 2.5, 4.5])
    assert rough == pytest.approx((abs(2.0 - 2.75) + abs(2.5 - 3.25)) / 2)


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
    with pytest.raises(InputError, match="text has no --scale gpu; give small"):
        parse_options(["text", "--scale", "gpu", "--out", str(tmp_path / "x")])
    command = [sys.executable, "-m", "accelerated.experiments", "memformer-9", "--runs", str(tmp_path / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and "nearest: memformer-" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_each_core_has_a_run_and_a_gpu_a_few(tmp_path):
    words = ["recall-tasks", "--out", str(tmp_path), "--runs", str(tmp_path)]
    for more, expected in (([], os.cpu_count()), (["--scale", "gpu"], GPU_JOBS), (["--scale", "gpu", "--jobs", "3"], 3)):
        assert parse_options([*words, *more]).jobs == expected
    with pytest.raises(InputError, match="--jobs 0 must be at least 1"):
        parse_options([*words, "--jobs", "0"])


def test_a_small_table_from_the_command_to_the_page(tmp_path, monkeypatch):
    """Two rows with one choice each, one seed, trained and evaluated by the real scripts."""
    monkeypatch.setattr("accelerated.experiments.measure.SEEDS", (0,))
    text = tmp_path / "text"
    content = "".join(f"def f{n}(x):\n    return x + {n % 7}\n" for n in range(2000))
    small = f"--data {text} --width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 1 --recurrent-layers none"
    small += " --batch 2 --steps 2 --warmup 1"
    first = Measure("training", lambda answer: answer["records"][0]["loss"])
    table = TWO._replace(
        rows=(Row("a", "--window {W} --segment {W}", sizes={"option": "--clear-memory"}), Row("b", "--window 8 --segment 8")),
        measures=(Measure("test", lambda answer: answer["bits_per_byte"], "score --split test {option}"), first),
        scales={"small": Scale(small, {"W": 8, "option": ""}, ("--learning-rate 0.01",))}, orderings=(Ordering("?", "a", "b"),),
        prepare=lambda: text.write_text(content),
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
    scale = shown(table.scales[record["scale"]])
    assert path.with_suffix(".md").read_text() == page(table, record)
    assert (record["options"], record["first"], record["grid"]) == (scale.options, scale.first, list(scale.grid))
    assert [(row["name"], row["options"], row["paper"]) for row in record["rows"]] == [
        (row.name, filled(row.options, row, scale), row.paper) for row in table.rows
    ]
    for row in record["rows"]:
        assert row["tuning"].keys() == set(scale.grid) and row["tuning"][row["choice"]] == min(row["tuning"].values())
        assert all(len(values) == 3 for values in row["measured"].values())
