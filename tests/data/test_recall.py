"""The recall task: answers follow from what a document told, and are never in its input."""

import dataclasses
from itertools import dropwhile, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.recall import (
    ASK,
    FILLER,
    LEAST,
    SYMBOLS,
    RecallConfig,
    RecallDocuments,
    chances,
    recall_document,
)
from accelerated.data.windows import SPLITS

MARKS = {ASK, *FILLER.tolist()}


@st.composite
def drawn(draw):
    """A config, and a document of it for training."""
    pairs = draw(st.integers(1, 20))
    own_values = draw(st.booleans())
    room = len(SYMBOLS) // pairs - 1 if own_values else len(SYMBOLS) - pairs  # for values
    config = RecallConfig(
        pairs=pairs,
        questions=draw(st.integers(1, 9)),
        spacing=draw(st.integers(2, 9)),
        values=draw(st.integers(2, min(12, room))),
        own_values=own_values,
        distance=draw(st.integers(0, 30)),
        vary_pairs=draw(st.booleans()),
        vary_distance=draw(st.booleans()),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return config, recall_document(config, rng, "x", training=True)


def documents(config, count, split="train"):
    """The first `count` documents of a split."""
    return list(islice(RecallDocuments(config, split), count))


def distance_of(config, document):
    """Tokens between the last fact of the opening and the first question."""
    return int(np.flatnonzero(document.scored)[0]) - 1 - config.opening


@given(drawn())
def test_an_answer_is_what_the_document_told_last(config_and_document):
    """An oracle reads the document and answers.

    A document is: [marks] facts | filler | questions `? key`. Marks stand for facts that it lacks.
    """
    config, document = config_and_document
    distance = distance_of(config, document)
    parts = np.split(document.inputs, [config.opening, config.opening + distance])
    opening, filler, rest = (part.tolist() for part in parts)
    told = [*dropwhile(MARKS.__contains__, opening)]
    known = dict(zip(told[::2], told[1::2], strict=True))

    assert len(told) == 2 * len(known), "each key is told once"
    assert config.vary_pairs or len(known) == config.pairs
    assert {*known} == {*SYMBOLS[::-1][: len(known)].tolist()}
    assert not {*known.values()} & (MARKS | {*known})
    assert {*filler} <= MARKS
    assert {*rest} <= MARKS | {*known}, "the questions hold no answer"
    asked = document.inputs[document.scored].tolist()
    assert document.targets[document.scored].tolist() == [known[key] for key in asked]


@given(drawn())
def test_a_document_has_the_sizes_of_its_config(config_and_document):
    config, document = config_and_document
    assert {len(field) for field in document[1:]} == {config.length}
    asked = np.flatnonzero(document.scored)  # places of the questions' keys
    assert len(asked) == config.questions
    assert (np.diff(asked) == config.spacing).all()
    assert (document.inputs[asked - 1] == ASK).all()
    distance = distance_of(config, document)
    assert 0 <= distance <= config.distance
    assert config.vary_distance or distance == config.distance


def test_only_training_documents_vary_in_facts_and_distance():
    """All that are told are asked for, of so many questions. Elsewhere no fact is lacking."""
    sizes = {"pairs": 9, "values": 2, "questions": 99, "distance": 5}
    config = RecallConfig(vary_pairs=True, vary_distance=True, **sizes)
    found = {}
    for split in SPLITS:
        told = set()
        distances = set()
        for document in documents(config, 400, split):
            told.add(len({*document.inputs[document.scored].tolist()}))
            distances.add(distance_of(config, document))
        found[split] = told, distances
    assert found == {
        "train": ({*range(1, 10)}, {*range(6)}),
        "valid": ({9}, {5}),
        "test": ({9}, {5}),
    }


def test_documents_depend_on_split_and_number_alone():
    splits = {split: RecallDocuments(RecallConfig(), split) for split in SPLITS}
    assert [len(splits[split]) for split in SPLITS] == [100_000, 64, 64]
    assert splits["test"].lengths.tolist() == [len(document.inputs) for document in splits["test"]]
    inputs = splits["train"][3].inputs
    assert (inputs == RecallDocuments(RecallConfig(), "train")[3].inputs).all()
    for other in (splits["train"][2], splits["valid"][3], splits["test"][3]):
        assert (inputs != other.inputs).any()


PUBLISHED = {  # name: (changes of the config, its answers, the tokens of document 1)
    "shared values": (
        {},
        b"0834",
        b"D3B4A8C0?C/+?A_&?D;:?B-:.;,+-!_-//,=<&!&=))(>,<;=;:!!.",
    ),
    "own values": (
        {"own_values": True},
        b"k8Ne",
        b"DNBeA8Ck?C/+?A_&?D;:?B-:.;,+-!_-//,=<&!&=))(>,<;=;:!!.",
    ),
}


@pytest.mark.parametrize("changes, answers, inputs", PUBLISHED.values(), ids=PUBLISHED)
def test_a_document_is_the_one_that_published_numbers_were_measured_on(changes, answers, inputs):
    """To the byte: a change of how a document is drawn would change the data unnoticed."""
    config = RecallConfig(questions=4, distance=30, vary_distance=True, **changes)
    document = RecallDocuments(config, "train")[1]
    assert bytes(document.inputs) == inputs
    assert bytes(document.targets[document.scored]) == answers


@pytest.mark.parametrize("name", LEAST)
def test_a_size_that_is_too_small_is_refused(name):
    least = {"pairs": 1, "values": 2, "questions": 1, "distance": 0, "spacing": 2}
    words = f"{name} is {least[name] - 1}; it must be at least {least[name]}"
    with pytest.raises(ValueError, match=words):
        RecallConfig(**{name: least[name] - 1})


def test_what_a_document_cannot_hold_is_refused():
    assert len(set(SYMBOLS.tolist())) == len(SYMBOLS)
    room = len(SYMBOLS) - 3
    assert RecallConfig(pairs=3, values=room)
    for own_values, values in ((False, room + 1), (True, room // 3 + 1)):
        with pytest.raises(ValueError, match="pairs is 3: with"):
            RecallConfig(pairs=3, values=values, own_values=own_values)


def right_without_keys(config, count):
    """The share of answers that the most frequent value of each document gives."""
    right = 0
    for document in documents(config, count, "train"):
        values = document.inputs[1 : config.opening : 2]
        counts = np.bincount(values)
        right += (document.targets[document.scored] == counts.argmax()).mean()
    return right / count


@pytest.mark.parametrize("sizes", [{}, {"pairs": 1}, {"pairs": 9, "values": 2}], ids=str)
def test_chances_are_those_of_a_guess_and_of_who_knows_the_values_alone(sizes):
    config = RecallConfig(questions=40, distance=0, **sizes)
    guess, told = chances(config).values()
    assert guess == 1 / config.values
    found = right_without_keys(config, 3000)
    assert abs(told - found) < 0.02, f"{told:.1%} expected, {found:.1%} found in documents"
    of_own_values = dataclasses.replace(config, own_values=True)
    assert [*chances(of_own_values).values()] == [guess, 1.0], "its values say all"
