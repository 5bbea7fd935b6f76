"""A table: what it measures, how its rows are tuned and trained, how its orderings are judged.

A page is that of its record.
"""

import json
import math
import platform
from pathlib import Path
from unittest.mock import Mock

import pytest

from accelerated.evaluation.figures import new_figure
from accelerated.lab import harness
from accelerated.lab.harness import SEEDS, mean_and_interval
from accelerated.lab.pages import label_ends, mean_and_spread
from accelerated.lab.tables import measure as module
from accelerated.lab.tables import table as table_module
from accelerated.lab.tables.__main__ import main
from accelerated.lab.tables.measure import settings_of, step_times, train_rows
from accelerated.lab.tables.orderings import (
    differences,
    in_words,
    over_documents,
    values_of,
    verdict,
)
from accelerated.lab.tables.page import page
from accelerated.lab.tables.picture import draw
from accelerated.lab.tables.table import TABLES, Measure, Row
from accelerated.lab.trials import Trial, Workshop, join
from accelerated.program.errors import InputError
from tests.helpers.programs import TWO, Rehearsal, evaluate, record_of, train

RESULTS = Path(__file__).parents[3] / "docs" / "results"
PUBLISHED = [name for name in TABLES if (RESULTS / f"{name}.json").exists()]


@pytest.mark.parametrize("name", TABLES)
def test_rows_can_be_trained_and_read_as_many_tokens_in_an_update(name):
    """If a row begins from a run, it does here without its weights."""
    adds_iterations = name.endswith("-claim")
    adds_iterations |= name in ("compressive-near", "memformer-3b", "card-slots")
    table = TABLES[name]
    tokens = {}
    for label, row in table.rows.items():
        options = join(table.first, table.options, row.options, table.grid[0])
        options = options.replace("--init FIRST", "")
        for fetched in ("packages/", "book/usr/share/doc/anarchism/markdown/"):
            options = options.replace(fetched, "stdlib")
        settings = settings_of(Trial("", options))
        training = settings.training
        segments = training.batch * training.horizon
        if adds_iterations:
            segments *= training.update_every
        tokens[label] = segments * settings.model_config.segment
    assert len(set(tokens.values())) == 1, tokens


DYNAMIC = {"dynamic": {"perplexity": 2.0}}
OVERLAP = {"rows": [{"splits": {"test": {"bits_per_byte": 1.5}}}]}
ANSWERS = [  # (table, title of a measure, what is answered, the number in it)
    ("block_recurrent-1", "test, bits per byte", {"bits_per_byte": 2.5}, 2.5),
    ("compressive-6", "dynamic", DYNAMIC, 2.0),
    ("pretrained_recurrence-4-5", "test, bits per byte", OVERLAP, 1.5),
]


@pytest.mark.parametrize("table, title, answer, expected", ANSWERS)
def test_a_measure_is_what_its_title_says(table, title, answer, expected):
    measure = next(m for m in TABLES[table].measures if m.title == title)
    assert measure.pick(answer) == expected


def test_step_times_are_of_1000_tokens_and_rows_take_turns(monkeypatch):
    """The clock says 2 s for a step.

    The second row reads four times as many tokens; half of the third's are not new.
    """

    def clock(calls, repeats, device):
        assert len(calls) == 3, "the same settings once"
        return {row: [2.0] * repeats for row in calls}

    monkeypatch.setattr(module, "time_in_turn", clock)
    made = Mock(wraps=module.prepared_step)
    monkeypatch.setattr(module, "prepared_step", made)
    sizes = "--width 8 --heads 2 --feed-forward 8 --segment 8"
    rows = f"{sizes} --model compressive --head-width 4 --layers 1"
    windows = f"{sizes} --model pretrained_recurrence --overlap 4 --horizon 1"
    rows = [
        f"{rows} --batch 5",
        f"{rows} --batch 10 --horizon 2 --accumulate 2",
        f"{windows} --batch 5",
        f"{rows} --batch 5",
    ]
    seconds = step_times([settings_of(Trial("", words)) for words in rows])
    sizes = [(training.horizon, own.batch) for (_, training, own), _ in made.call_args_list]
    assert sizes == [(1, 5), (2, 10), (1, 5)], "segments and lanes"
    assert [of_row[0] for of_row in seconds] == [50.0, 12.5, 100.0, 50.0]


def test_rows_are_tuned_alike_on_seed_0_and_trained_with_their_own_choice_and_all_seeds(tmp_path):
    """From a first run that is trained before them.

    The rehearsal's training losses are the negative of its validations.
    """
    shop = Rehearsal(tmp_path, loss={"--x 1 --rate 2": 0.5, "--x 2 --rate 3": 0.25})
    grid = ["--rate 1", "--rate 2", "--rate 3"]
    rows = TWO.rows | {"c": Row("--x 3")}
    fields = {"options": "--init FIRST --width 8", "first": "--width 8 --long"}
    table = TWO._replace(rows=rows, grid=grid, **fields)
    tuning, trials = train_rows(table, shop, table.seeds, dict.fromkeys(rows, grid))
    first = shop.folder(Trial("", "--width 8 --long"))
    assert first.exists()
    assert "--init" not in shop.calls[0]
    losses = {"a": [1.0, 0.5, 1.0], "b": [1.0, 1.0, 0.25], "c": [1.0] * 3}
    assert tuning == {name: dict(zip(grid, own, strict=True)) for name, own in losses.items()}
    assert all("--seed 0" in " ".join(call) for call in shop.calls[:10])
    assert len(shop.calls) == 1 + 9 + 3 * 2
    chosen = {"a": "--x 1 --rate 2", "b": "--x 2 --rate 3", "c": "--x 3 --rate 1"}  # c has a tie
    for name, own in chosen.items():
        options = f"--init {first} --width 8 {own}"
        assert trials[name] == [Trial(name, options, seed) for seed in (0, 1, 2)]

    table = table._replace(headline=["b"])
    _, trials = train_rows(table, shop, table.seeds, dict.fromkeys(rows, grid))
    assert {name: len(of_row) for name, of_row in trials.items()} == {"a": 3, "b": 5, "c": 3}


@pytest.fixture
def measured(text, tmp_path, monkeypatch, capsys):
    """measured(words, folder) is the command for a small table; returns what it prints.

    Two rows with one choice each, one seed, trained and evaluated by the real scripts, which run in
    this process.
    """
    scripts = {"train.py": train, "eval.py": evaluate}

    def run(shop, command):
        _, script, *words = command
        scripts[Path(script).name](*words)
        return 0, capsys.readouterr().out, ""

    def one_by_one(shop, function, each):
        for one in each:
            function(one)

    monkeypatch.setattr(Workshop, "run", run)
    monkeypatch.setattr(Workshop, "in_parallel", one_by_one)
    monkeypatch.setattr(table_module, "SEEDS", (0,))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    small = "--width 8 --heads 2 --head-width 4 --feed-forward 8 --layers 1 --recurrent-layers none"
    sizes = "--window 8 --segment 8"
    table = TWO._replace(
        options=f"--data {text} {small} --batch 2 --steps 2 --warmup 1",
        rows={"a": Row(sizes, asked="--clear-memory"), "b": Row(sizes)},
        measures=[Measure("test", "score --split test", "bits_per_byte")],
        grid=["--learning-rate 0.01"],
    )
    monkeypatch.setitem(TABLES, "a-table", table)

    def command(words, out):
        main(["a-table", "--runs", str(tmp_path / "runs"), "--out", str(out), *words.split()])
        return capsys.readouterr().out

    return command


def test_a_small_table_from_the_command_to_the_page(measured, tmp_path, monkeypatch):
    """Rows with the same options share a run. What the record has is not measured again."""
    measured("--jobs 3", tmp_path)
    file = tmp_path / "a-table.json"
    record = json.loads(file.read_text())
    a, b = record["rows"]
    folders = [*(tmp_path / "runs").iterdir()]
    assert len(folders) == 1, "rows with the same options share a run"
    assert a["measured"]["test"][0] != b["measured"]["test"][0], "a is read with its memory cleared"
    assert a["parameters"] == b["parameters"] > 0
    assert len(a["step_seconds"]) == 45
    assert record["python"] == platform.python_version()
    assert (tmp_path / "a-table.md").read_text() == page(TABLES["a-table"], record)
    assert (tmp_path / "a-table.svg").exists(), "the page shows it, of orderings too"

    monkeypatch.setattr(module, "train_rows", lambda *given: pytest.fail("trained again"))
    (tmp_path / "a-table.md").unlink()
    measured("", tmp_path)
    assert (tmp_path / "a-table.md").read_text() == page(TABLES["a-table"], record)
    assert json.loads(file.read_text()) == record, "what it has is not measured again"


def test_a_part_is_measured_at_the_published_rates_and_has_no_page(measured, tmp_path, monkeypatch):
    """It is not written over a whole: lab/test_harness.py."""
    measured("", tmp_path)
    record = json.loads((tmp_path / "a-table.json").read_text())
    wider = TABLES["a-table"]._replace(grid=["--learning-rate 0.02", "--learning-rate 0.01"])
    monkeypatch.setitem(TABLES, "a-table", wider)
    part = tmp_path / "part"
    said = measured("--rows b --seeds 0 1", part)
    [b] = json.loads((part / "a-table.json").read_text())["rows"]
    assert (b["choice"], b["seeds"]) == ("--learning-rate 0.01", [0, 1])
    assert b["measured"]["test"][0] == record["rows"][1]["measured"]["test"][0]
    assert f"| b | {mean_and_spread(b['measured']['test'], '.3f')} |" in said
    assert [path.name for path in part.iterdir()] == ["a-table.json"]

    monkeypatch.setitem(TABLES, "a-table", wider._replace(options="--width 9"))
    with pytest.raises(InputError, match="has runs of other options than its table"):
        measured("", tmp_path)
    (tmp_path / "a-table.json").write_text("{")
    with pytest.raises(InputError, match="is no record of runs"):
        measured("", tmp_path)


def test_a_row_that_diverges_at_its_best_rate_is_named(tmp_path):
    """At another one it is not chosen, its bits are infinite, and it is not tried again."""
    line = "train.py: the loss is nan at step 3; x; try a lower --learning-rate"
    grid = ["--rate 1", "--rate 2"]
    shop = Rehearsal(tmp_path, fails={"--rate 2": line})
    rows = dict.fromkeys(TWO.rows, grid)
    tuning, _ = train_rows(TWO, shop, TWO.seeds, rows)
    count = len(shop.calls)
    train_rows(TWO, shop, TWO.seeds, rows)
    assert len(shop.calls) == count, "a run that diverged is tried again"
    assert [*tuning.values()] == [{"--rate 1": 1.0, "--rate 2": math.inf}] * 2
    shop = Rehearsal(tmp_path / "other", fails={"--seed 2": line})
    with pytest.raises(InputError, match="a, seed 2, diverged; try lower rates"):
        train_rows(TWO, shop, TWO.seeds, rows)


def test_a_page_is_of_its_record():
    """Rows of which a test scored no documents have no interval over them."""
    table = TWO._replace(change="Another one.", orderings=["a < b", "b < a"])
    record = record_of(a=[1.0, 1.1, 1.2], b=[1.5, 2.25, 2.0])
    text = " ".join(page(table, record).split())
    assert "**It is about this.**" in text
    assert "| a | 1.100 (1.000..1.200) | 3 |" in text
    assert "**What would change this answer.** Another one." in text
    assert "over documents" not in text


def test_an_ordering_is_judged_by_the_interval_of_its_mean_difference():
    assert verdict([0.029, 0.031, 0.030]) == "holds", "0.030 ± 0.0025"
    by_luck = "all agree, as they do by luck one time in four: 0.030 ± 0.066"
    assert verdict([0.01, 0.02, 0.06]) == "cannot be told", by_luck
    assert verdict([0.5]) == "cannot be told"
    assert verdict([-0.029, -0.031, -0.030]) == "does not hold"


@pytest.mark.parametrize("seeds, student", [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776)])
def test_the_interval_is_students_t_times_the_standard_error(seeds, student):
    with_error_1 = [float(seeds)] + [0.0] * (seeds - 1)
    _, half = mean_and_interval(with_error_1)
    assert half == pytest.approx(student)


def test_differences_are_worse_minus_better_seed_by_seed():
    """Of the seeds that both rows have, if one has more.

    A side is of the first measure, or of the first row.
    """
    record = record_of(a=[1.0, 2.5, 3.0, 4.0], b=[1.5, 2.25, 2.0])
    a, b = record["rows"]
    a["measured"]["other"] = [9.0, 8.0, 7.0, 6.0]
    b["measured"]["other"] = [10.0, 9.0, 9.0]
    assert differences(record, "a < b") == [0.5, -0.25, -1.0]
    assert differences(record, "b < a @ other") == [7.5, 5.75, 5.0]
    assert differences(record, "b - a @ other < other") == [8.0, 7.0, 5.0]
    assert values_of(record, "b - a") == {0: 0.5, 1: -0.25, 2: -1.0}
    b["seeds"] = [1, 3, 7]
    assert differences(record, "a < b") == [-1.0, -1.75], "by their seeds, not their places"


def test_an_interval_over_documents_is_of_their_sums_and_of_the_seeds_means():
    """Documents that are all alike leave no doubt; one that alone decides leaves all."""
    bits = math.log(2)
    alike = [{"nats": 2 * bits * size, "text_bytes": size} for size in (10, 20, 30)]
    record = record_of(a=[1.0, 1.0], b=[1.5, 2.0])
    a, b = record["rows"]
    a["measured"]["documents"] = [alike, alike]
    worse = [each | {"nats": 1.5 * each["nats"]} for each in alike]  # by a bit for each byte
    b["measured"]["documents"] = [alike, worse]
    assert over_documents(record, "a < b") == pytest.approx((0.5, 0.5))
    a["measured"]["documents"] = [alike, alike, worse]
    assert over_documents(record, "a < b") == pytest.approx((0.5, 0.5)), "b has no third seed"
    assert "| a against b | +0.750 ± 3.176 | +0.500..+0.500 |" in page(TWO, record)

    one = [alike[0] | {"nats": 8 * bits * 10}, *alike[1:]]
    b["measured"]["documents"] = [one, one]
    low, high = over_documents(record, "a < b")
    assert low == 0, "it is not drawn in 8 of 27"
    assert 2 < high <= 6, "drawn thrice, it is the difference"


def test_an_ordering_in_words_names_a_measure_if_it_is_not_the_first():
    record = record_of(a=[1.0], b=[2.0])
    [first] = record["rows"][0]["measured"]
    assert in_words(record, f"a @ {first} < b @ cleared") == "a against b, cleared"
    assert in_words(record, "a - b < b - a") == "a - b against b - a"


def test_names_at_the_ends_of_lines_stand_apart():
    _, [axes] = new_figure()
    axes.set_ylim(0, 1)
    label_ends(axes, {"a": (1, 0.1), "b": (1, 0.09), "c": (1, 0.9)}, dict.fromkeys("abc", "C0"))
    places = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert places == pytest.approx({"b": 0.09, "a": 0.09 + 1 / 18, "c": 0.9})


def test_a_table_of_a_library_is_refused_by_another_python(tmp_path, monkeypatch):
    """Its page would say that it read Python 3.0's."""
    monkeypatch.setitem(TABLES, "a-table", TWO._replace(python="3.0"))
    with pytest.raises(InputError, match=r"Python 3.0's library, .*; run it with Python 3.0"):
        main(["a-table", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_page_is_that_of_its_record_and_its_record_that_of_its_table(name, tmp_path):
    """Its picture can be drawn."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    table = TABLES[name]
    text = (RESULTS / f"{table.page or name}.md").read_text()
    if not table.page:
        made = page(table, record)
        assert text.split("\n") == made.split("\n"), "what makes pages has changed, or the record"
    assert f"({name}.svg)" in text
    assert f"tables {name}\n" in text
    draw(table, record, tmp_path / "drawn.svg")

    assert record["options"] == table.options
    assert record["first"] == table.first
    assert record["grid"] == table.grid
    for own, (label, row) in zip(record["rows"], table.rows.items(), strict=True):
        assert (own["name"], own["options"].strip()) == (label, row.options)
        assert own["paper"] == row.paper
        assert own["tuning"].keys() == set(table.grid)
        assert own["tuning"][own["choice"]] == min(own["tuning"].values())
        seeds = 5 if label in table.headline else len(SEEDS)
        missing = {each.title for each in table.measures} - own["measured"].keys()
        assert missing <= {"documents"}, "these are scored of the rows that a page compares"
        assert own["seeds"] == [*range(seeds)]
        assert {len(values) for values in own["measured"].values()} == {seeds}
