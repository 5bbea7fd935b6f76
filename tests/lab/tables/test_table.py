"""Tables are read as they are written; rows read as many tokens; a measure is what its title says."""

import math
import re
from pathlib import Path

import pytest

from accelerated.lab.tables.measure import PREPARE, settings_of
from accelerated.lab.tables.table import TABLES, Row, lines_of
from accelerated.lab.trials import LOG, LOG_NUMBERS, Trial, join

METHODS = ("compressive", "Transformer-XL", "block-recurrent", "Slide", "Memformer", "Memorizing", "recurrent GPT-2", "GPT-2")


def row_settings(table, row):
    """The Settings of a row as it is trained, of a row that begins from another run without its weights."""
    options = join(table.options, row.options)
    if table.first:
        options = join(table.first, options.replace("--init FIRST", ""))
    return settings_of(Trial("", join(options, table.grid[0])))


@pytest.fixture(autouse=True)
def recordings(tmp_path_factory, monkeypatch):
    """The folder in which one table finds its speech."""
    monkeypatch.chdir(tmp_path_factory.mktemp("recordings"))
    Path("runs/speech").mkdir(parents=True)


def test_a_line_with_groups_stands_for_one_line_of_each_choice():
    assert lines_of("a\n\n  b {1;2,3} c {x;y}\n") == ["a", "b 1 c x", "b 2,3 c y"]
    with pytest.raises(ValueError, match="zip"):
        lines_of("{1;2} {1;2;3}")


@pytest.mark.parametrize("name", TABLES)
def test_rows_can_be_trained_and_read_as_many_tokens_in_an_update(name):
    """The methods of the recall family, which are trained in different ways, learn the same task."""
    tokens, tasks = {}, set()
    for label, row in TABLES[name].rows.items():
        settings = row_settings(TABLES[name], row)
        training = settings.training
        summed = name.endswith("-claim") or name == "memformer-3b"  # iterations of short segments that are an update
        added = training.update_every if summed else 1
        tokens[label] = added * training.batch * training.horizon * settings.model_config.segment
        tasks.add(settings.recall)
    assert len(tasks) == 1 and (len(set(tokens.values())) == 1 or name.startswith("recall-")), tokens


def test_a_cell_of_the_recall_family_asks_its_own():
    for method in METHODS:
        asked = [row.asked for name, row in TABLES["recall-distance"].rows.items() if name.startswith(f"{method}: distance ")]
        assert asked == [f"--recall-distance {16 * segments}" for segments in (1, 4, 16, 64, 256, 1024)]
    for name, row in TABLES["recall-capacity"].rows.items():
        assert row.asked == f"--recall-pairs {int(name.partition(': ')[2].partition(' facts')[0])}", name


@pytest.mark.parametrize("name", TABLES)
def test_what_a_table_names_is_there(name):
    """Rows and measures that its orderings and its picture name are, or its page could not be written."""
    table = TABLES[name]
    assert len({m.title for m in table.measures}) == len(table.measures), "each once"
    assert table.tuned_by[0] in LOG_NUMBERS and table.prepare in {"", *PREPARE}
    words = [table.options, table.first, *table.grid, *(word for row in table.rows.values() for word in row)]
    assert not re.search(r"[{}$]", " ".join(words))


@pytest.mark.parametrize("name", TABLES)
def test_both_sides_of_an_ordering_have_one_unit(name):
    table = TABLES[name]
    paths = {m.title: "bits_per_byte" if m.report == LOG else re.sub(r"/\d+$", "", m.path) for m in table.measures}
    kinds = {m.title: (re.split("[/=]", paths[m.title])[-1], m.times) for m in table.measures}
    for ordering in table.orderings:
        sides = [side.partition(" @ ") for side in ordering.split(" < ")]
        units = {kinds[title or (names if names in kinds else table.measures[0].title)] for names, _, title in sides}
        assert len(units) == 1, ordering


ATTENTION = {"memory": {"mean": [0.5, 0.25, 0.125, 0.0625, 0.03, 0.02]}, "segment": {"mean": [0.01] * 6}}
POSITIONS = {"memory_carried": [{"start": 64, "bits_per_byte": 2.5}, {"start": 128, "bits_per_byte": 2.25}], "memory_cleared": []}
SPLITS = {"test": {"bits_per_byte": 2.5, "word_perplexity": 9.0}, "valid": {"bits_per_byte": 3.0, "word_perplexity": 8.0}}
WINDOWS = {"rows": [{"splits": SPLITS, "counted_flops_per_token": 7e6, "flops_per_token": 6e6}]}
LOSSES = [{"step": n, "loss": 1, "bits_per_byte": bits} for n, bits in enumerate((9.0, 9.0, 3.0, 2.0), 1)]
LOSSES.append({"step": 4, "final": True, "bits_per_byte": 0.0})


@pytest.mark.parametrize(
    "table, title, answer, expected",
    [
        ("methods", "test, bits per byte", {"bits_per_byte": 2.5}, 2.5),
        ("memformer-1", "test, perplexity per token", {"perplexity": 7.0, "bits_per_byte": 2.5}, 7.0),
        ("compressive-6", "dynamic", {"static": {"perplexity": 3.0}, "dynamic": {"perplexity": 2.0}}, 2.0),
        ("compressive-2-6", "attention to memory, 2 of 6", {"attention": ATTENTION}, 25.0),
        ("compressive-2-6", "compression loss of layer 2", {"attention_reconstruction_loss": [0.5, 0.25]}, 0.25),
        ("text", "at 128 to 255", {"by_position": POSITIONS}, 2.25),
        ("compressive-3", "training, bits per byte", LOSSES, 2.5),
        ("compressive-4", "nats per sample", {"bits_per_byte": 2.0}, 2 * math.log(2)),
        ("pretrained_recurrence-1-2", "test, bits per byte", WINDOWS, 2.5),
        ("pretrained_recurrence-1-2", "perplexity per word", WINDOWS, 9.0),
        ("pretrained_recurrence-1-2", "FLOPs per token", WINDOWS, 7e6),
        ("pretrained_recurrence-topics", "divergences", {"mean": 0.5, "divergences": [0.25, 0.75]}, [0.25, 0.75]),
        ("recall-rewriting", "right", {"accuracy": 0.5, "bits_per_byte": 1.0}, 0.5),
    ],
)
def test_a_measure_is_what_its_title_says(table, title, answer, expected):
    measure = next(m for m in TABLES[table].measures if m.title == title)
    assert measure.pick(answer) == expected
    assert measure.words(Row("", asked="--memory 16")) == (f"{measure.report} --memory 16" if measure.report != LOG else LOG)


def test_figure_3a_is_measured_on_the_validations_of_a_log():
    bits = {25: 3.0, 50: 2.0, 75: 2.5, 100: 4.5}
    records = [{"step": 25, "loss": 1.0}, *({"step": n, "validation_bits_per_byte": b} for n, b in bits.items())]
    records.append({"step": 100, "validation_bits_per_byte": 4.25, "final": True})
    best, last_above_best, rough, *points = (m.pick(records) for m in TABLES["memformer-3a"].measures[:7])
    assert (best, last_above_best, points) == (2.0, 2.5, [3.0, 2.0, 2.5, 4.5])
    assert rough == pytest.approx((abs(2.0 - 2.75) + abs(2.5 - 3.25)) / 2)


def test_capacity_is_tuned_by_the_last_tenth_of_the_updates():
    """Whatever a validation on 64 facts says; a run that diverged is never the best."""
    log = [{"step": step, "loss": 0.5, "bits_per_byte": float(step)} for step in range(1, 21)]
    log.append({"step": 20, "final": True, "validation_bits_per_byte": 9.0})
    score, diverged = LOG_NUMBERS[TABLES["recall-capacity"].tuned_by[0]], {"step": 0, "final": True, "diverged": "NaN"}
    assert score(log) == 19.5 and score([*log, diverged]) == score([diverged]) == math.inf
