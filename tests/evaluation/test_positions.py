"""Losses by position equal a count by hand."""

import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.evaluation import positions
from accelerated.evaluation.positions import by_position, doubling_ranges
from accelerated.evaluation.score import token_nats
from tests.helpers.reading import trained_run
from tests.helpers.texts import BYTES, document_from, documents_and_tokenizer, random_nats


@given(first=st.integers(1, 9), length=st.integers(0, 200))
def test_doubling_ranges(first, length):
    """They cover everything; from the second on each begins at twice the one before."""
    starts = [0, *(first * 2**index for index in range(9))]
    edges = [*(start for start in starts if start < length), length]
    assert list(doubling_ranges(first, length)) == [*itertools.pairwise(edges)], "each begins at 2x"


@given(corpus=documents_and_tokenizer(), first=st.integers(1, 9), seed=st.integers(0, 3))
def test_rows_by_position_are_those_of_counting_token_by_token(corpus, first, seed):
    documents, tokenizer = corpus
    nats = random_nats(documents, seed)
    rows = by_position(nats, documents, tokenizer, first)
    longest = max((len(document.inputs) for document in documents), default=0)
    ranges = list(doubling_ranges(first, longest + 1)) if longest else []
    assert [(row["start"], row["stop"]) for row in rows] == ranges, "rows end at the last token's"
    for row in rows:
        losses = []
        targets = []
        reached = 0
        for document, of_document in zip(documents, nats, strict=True):
            places = range(max(row["start"] - 1, 0), min(row["stop"] - 1, len(of_document)))
            reached += len(places) > 0
            scored = [place for place in places if document.scored[place]]
            losses += of_document[scored].tolist()
            targets += document.targets[scored].tolist()
        text_bytes = len(tokenizer.decode(targets))
        expected = {"documents": reached, "tokens": len(losses), "text_bytes": text_bytes}
        expected["nats"] = sum(losses)
        for name, units in (("bits_per_token", len(losses)), ("bits_per_byte", text_bytes)):
            expected[name] = sum(losses) / units / math.log(2) if units else math.nan
        for name, right in expected.items():
            where = f"of positions {row['start']} to {row['stop'] - 1}"
            said = f"{name} {where} is {row[name]}, and {right} counted token by token"
            assert row[name] == pytest.approx(right, rel=1e-12, nan_ok=True), said


def test_a_line_says_the_first_and_the_last_position_and_bits_per_byte():
    row = {"start": 0, "stop": 4, "documents": 2, "tokens": 7, "bits_per_byte": 1.5}
    line = positions.position_lines({"memory carried": [row]})[-1]
    assert line.split() == ["0", "to", "3", "2", "7", "1.5000"], "look at position_lines"


def test_the_table_ends_with_what_the_memory_saves_after_the_first_segment():
    """A row of one document is marked; the first segment does not count."""
    first = {"start": 0, "stop": 4, "documents": 2, "tokens": 7, "text_bytes": 7}
    later = {"start": 4, "stop": 8, "documents": 1, "tokens": 3, "text_bytes": 4}
    readings = []
    for nats in (4.0, 8.0):
        rows = [row | {"nats": nats, "bits_per_byte": nats / 4} for row in (first, later)]
        readings.append(rows)
    lines = positions.saved_lines(*readings)
    assert lines[3].split() == ["4", "to", "7", "1*", "3", "1.0000", "2.0000", "1.0000"]
    assert lines[4].startswith("* of one document"), "the last row has one document: position_lines"
    saved = 4 / math.log(2) / 4
    end = f"the memory saves {saved:.4f} bits per byte, 50.0%"
    assert lines[5] == f"after the first 4 tokens of a document {end}", "after the first segment"


@pytest.mark.parametrize("name", ["overlapping", "plain"])
def test_the_report_has_the_losses_of_both_readings(name):
    """Token by token as scoring has them; a model that carries nothing has one reading."""
    texts = ["the theatre and the abbey " * count for count in (3, 1)]
    documents = [document_from(text, BYTES) for text in texts]
    run = trained_run("pretrained_recurrence", name, documents)
    model = run.model
    record, _ = positions.report(run, SimpleNamespace(plot=None))
    assert record["attention_reach"] == model.attention_reach, "how far attention reaches"
    ways = {"memory_carried": False}
    if name == "overlapping":
        ways["cleared"] = True
    assert record["by_position"].keys() == ways.keys(), "what carries nothing has one reading"
    for way, clear in ways.items():
        nats = token_nats(model, documents, 1, clear)
        expected = by_position(nats, documents, BYTES, model.config.segment)
        found = record["by_position"][way]
        for row, right in zip(found, expected, strict=True):
            assert row == pytest.approx(right, rel=1e-9, nan_ok=True), f"{way}: another reading"
