"""Rows differ only in what their table is about; orderings and measures are what their names say."""

import json
import math
import re
from unittest.mock import MagicMock

import pytest

from accelerated.lab.tables import compressive, memformer, pretrained_recurrence
from accelerated.lab.tables.__main__ import TABLES
from accelerated.lab.tables.compressive import RECORDINGS
from accelerated.lab.tables.measure import settings_of
from accelerated.lab.tables.pretrained_recurrence import DIVERGENCES, TOPICS, pareto_line, points_of, sign_test
from accelerated.lab.tables.recall import (
    CAPACITY,
    DISTANCE,
    METHODS,
    RECALL,
    RIGHT,
    TASKS,
    documents_to_read,
    draw_accuracies,
    draw_family,
)
from accelerated.lab.tables.table import CARRIED, filled, shown
from accelerated.lab.trials import Trial, join

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
    alike = ("optimizer", "warmup", "clip", "dtype", "seed", "weight_decay")
    found = [row_settings(name, scale, row)[0] for row in TABLES[name].rows]
    if name in ("text", "compressive-3", *RECALL):
        return
    assert len({(s.data, *(getattr(s.training, field) for field in alike)) for s in found}) == 1
    if name in ("pretrained_recurrence-1-2", "pretrained_recurrence-modules"):  # with an overlap it takes more steps
        tokens = [s.training.steps * (s.model_config.segment - s.model_config.overlap) for s in found]
        assert max(tokens) < 1.002 * min(tokens)
    else:
        assert len({s.training.steps for s in found}) == 1


def test_the_pareto_line_has_what_nothing_beats_for_less():
    measured = {"GPT-2, T": (3, 2.0), "GPT-2, T / 2": (2, 2.1), "recurrent, T": (3, 1.9), "recurrent, T / 2": (2.5, 2.1)}
    titles = "FLOPs per token", "test, bits per byte"
    rows = [
        {"name": name, "measured": {title: [value - 1, value, value + 1] for title, value in zip(titles, values, strict=True)}}
        for name, values in measured.items()
    ]
    line = pareto_line(points_of({"rows": rows}))
    assert [(point.name, point.flops, point.bits) for point in line] == [("GPT-2, T / 2", 2, 2.1), ("recurrent, T", 3, 1.9)]


def test_a_task_of_the_recall_family_is_what_its_options_give():
    """Whatever the preset of a model says: each has a recall task of its own."""
    found = set()
    for name in RECALL:
        for row in TABLES[name].rows:
            label = row.name.partition(": ")[2].removesuffix(", large")
            config = TASKS.get(label) or (CAPACITY if label.endswith("facts") else DISTANCE)
            assert row_settings(name, "small", row)[0].recall == config, row.name
            found.add(config)
    assert found == {DISTANCE, CAPACITY, *TASKS.values()}


def test_capacity_is_tuned_by_the_end_of_training():
    """By the last tenth of the updates, whatever a validation on 64 facts says; a run that diverged is never the best."""
    log = [{"step": step, "loss": 0.5, "bits_per_byte": float(step)} for step in range(1, 21)]
    log += [{"step": 20, "validation_bits_per_byte": 9.0}, {"step": 20, "final": True, "validation_bits_per_byte": 9.0}]
    score = TABLES["recall-capacity"].tuned_by[1]
    assert score(log) == 19.5 and score([*log, {"step": 0, "final": True, "diverged": "NaN"}]) == math.inf
    assert score([{"step": 0, "final": True, "diverged": "NaN"}]) == math.inf


def test_a_cell_of_the_recall_family_asks_its_own_and_a_large_state_holds_four_times_as_much():
    rows = {row.name: row for name in RECALL for row in TABLES[name].rows}
    for method in METHODS:
        asked = [row.sizes["asked"] for name, row in rows.items() if name.startswith(f"{method}: distance ")]
        assert asked == [f"--recall-distance {16 * segments}" for segments in (1, 4, 16, 64, 256, 1024)]
        for facts in (2, 4, 8, 16, 32, 64):
            usual, large = (rows.get(f"{method}: {facts} facts{more}") for more in ("", ", large"))
            assert (large is None) == (method in ("Slide", "Memorizing", "GPT-2")) and usual.sizes[
                "asked"
            ] == f"--recall-pairs {facts}"
            if large:
                assert large.sizes == usual.sizes
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


def test_the_picture_of_recall_has_the_cells_of_all_its_tables_but_large_states(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("accelerated.lab.tables.recall.draw_accuracies", lambda found, path: drawn.append((found, path.name)))
    both = ["2 facts", "2 facts, large"]
    for name, cells in (("recall-copying", ["copying"]), ("recall-distance", ["distance 1"]), ("recall-capacity", both)):
        for scale, right in (("", 0.5), ("-gpu", 0.75)):
            rows = [{"name": f"{m}: {asked}", "measured": {RIGHT.title: [right]}} for m in ("Slide", "GPT-2") for asked in cells]
            (tmp_path / f"{name}{scale}.json").write_text(json.dumps({"rows": rows}))
    for scale, right in (("small", 0.5), ("gpu", 0.75)):
        draw_family({"scale": scale}, tmp_path / "recall.svg")
        own = {"distance 1": [right], "2 facts": [right], "copying": [right]}
        assert drawn.pop() == ({"Slide": own, "GPT-2": own}, "recall.svg") and not drawn


def test_a_cell_is_coloured_from_its_own_tasks_guess_to_all_right(monkeypatch, tmp_path):
    shades, said = [], []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda axes, x, y, text, **others: said.append((x, y, text)))
    monkeypatch.setattr("matplotlib.axes.Axes.imshow", lambda axes, given, **others: shades.extend(given))
    monkeypatch.setattr("matplotlib.figure.Figure.colorbar", lambda *given, **others: MagicMock())
    found = {"Slide": {"distance 1": [0.1, 1.0], "2 facts": [0.5], "copying": [0.0]}, "GPT-2": {"2 facts": [0.75]}}
    draw_accuracies(found, tmp_path / "recall.svg")
    assert shades[0] == pytest.approx([0.5, 0.0, 0.0])
    assert shades[1] == pytest.approx([math.nan, 0.5, math.nan], nan_ok=True)
    assert said == [(0, 0, "55"), (1, 0, "50"), (2, 0, "0"), (1, 1, "75")], "and nothing where a method has no such cell"


def test_facts_known_are_those_that_a_guess_would_not_answer():
    """Of n facts a model that knows k and guesses the others answers (n + k) / 2n."""
    right = {"Slide: 2 facts": [1.0], "Slide: 64 facts": [0.5, 0.625], "GPT-2: 2 facts": [0.25], "GPT-2: 2 facts, large": [1.0]}
    rows = [{"name": name, "measured": {RIGHT.title: values}} for name, values in right.items()]
    table = TABLES["recall-capacity"]
    lines = table.results(table, {"rows": rows}).splitlines()
    assert lines[-2:] == ["| Slide | 8 |  |", "| GPT-2 | 0 | 2 |"] and "| 64 facts | 56.2 (50.0 .. 62.5) |" in lines


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
        (compressive.TABLE_6.measures[2], {"static": {"perplexity": 3.0}, "dynamic": {"perplexity": 2.0}}, 2.0),
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


def test_figure_3a_is_measured_on_the_validations_of_a_log():
    bits = {25: 3.0, 50: 2.0, 75: 2.5, 100: 4.5}
    records = [{"step": 25, "loss": 1.0}, *({"step": n, "validation_bits_per_byte": b} for n, b in bits.items())]
    records.append({"step": 100, "validation_bits_per_byte": 4.5, "final": True})
    best, last_above_best, rough, *points = (m.pick({"records": records}) for m in memformer.FIGURE_3A.measures[:7])
    assert (best, last_above_best, points) == (2.0, 2.5, [3.0, 2.0, 2.5, 4.5])
    assert rough == pytest.approx((abs(2.0 - 2.75) + abs(2.5 - 3.25)) / 2)
