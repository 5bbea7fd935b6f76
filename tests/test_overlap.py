"""The table of overlaps: what a row says, and which runs are averaged."""

import dataclasses

import pytest
from test_pretrained_recurrence import SMALL

from accelerated.evaluation.overlap import Row, differences, mean_lines, model_name, overlap_table
from accelerated.evaluation.score import Score

SCORE = Score(nats=20.0, tokens=50, right=3, text_bytes=40)


def row(run, config=SMALL, notes=(), nats=20.0, words=4):
    score = SCORE._replace(nats=nats)
    return Row(run, config, notes, {"valid": (score, words), "test": (score, words)}, 1.75e8, 1.9e8)


def test_a_row_has_perplexity_per_word_bits_per_byte_and_log_probability_of_every_split():
    header, line = overlap_table([row("runs/a", notes=("trained with overlap 0", "memory cleared"))])
    words = " ".join(header.split())
    columns = "ppl/word bits/byte log p, nats"
    assert words == f"model overlap valid {columns} test {columns} FLOPs/token counted run"
    assert line.split()[:3] == ["recurrent,", "window", "6"] and line.split()[3] == "2"
    assert line.split()[4:7] == line.split()[7:10] == ["148.41", "0.7213", "-20.0"]
    assert line.split()[10:13] == ["1.75e+08", "1.90e+08", "runs/a"] and line.endswith("(trained with overlap 0, memory cleared)")


def test_a_text_without_words_has_no_perplexity_per_word():
    assert overlap_table([row("a", words=0)])[1].split()[4] == "-"
    assert "ppl/word -," in mean_lines([row("a", words=0), row("b", words=0)])[1]


def test_runs_of_one_config_are_averaged_and_no_others():
    assert mean_lines([row("a"), row("b", dataclasses.replace(SMALL, overlap=0))]) == []
    others = [dataclasses.replace(SMALL, **change) for change in ({"pooling": "max"}, {"layers": 4}, {"feed_forward": 9})]
    assert mean_lines([row("a"), *(row("b", other) for other in others), row("c", notes=("memory cleared",))]) == []
    head, line = mean_lines([row("a", nats=10.0), row("b", nats=20.0), row("c", nats=30.0), row("d", others[0])])
    assert head == "mean (least .. most):" and line.startswith(
        "recurrent, window 6, overlap 2, 3 runs: valid ppl/word 656.21 (12.182 .. 1808)"
    )
    assert "bits/byte 0.7213 (0.3607 .. 1.0820)" in line


def test_what_differs_from_training_is_said():
    other = dataclasses.replace(SMALL, segment=4, overlap=0, pool="advance")
    assert differences(other, SMALL) == ("segment 6", "overlap 2", "pool all") and differences(SMALL, SMALL) == ()
    plain = dataclasses.replace(SMALL, vectors=0)
    assert differences(dataclasses.replace(plain, overlap=0, pool="advance"), plain) == ()
    assert differences(dataclasses.replace(plain, segment=5), plain) == ("segment 6",)


@pytest.mark.parametrize(
    "vectors,name", [(0, "GPT-2, window 6"), (1, "recurrent, window 6"), (3, "recurrent, window 6, 3 vectors")]
)
def test_models_are_named_by_what_the_papers_tables_compare(vectors, name):
    assert model_name(dataclasses.replace(SMALL, vectors=vectors)) == name
