"""The recall task: answers follow from what a document told, and are never in its input."""

from itertools import islice, takewhile

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
    recall_document,
)
from accelerated.data.windows import SPLITS

MARKS = {ASK, *FILLER.tolist()}


@st.composite
def drawn(draw):
    """A config with room for what stands in its filler, and a document of it for training."""
    pairs = draw(st.integers(1, 20))
    rewrites = draw(st.integers(0, 9))
    config = RecallConfig(
        pairs=pairs,
        rewrites=rewrites,
        questions=draw(st.integers(1, 9)),
        spacing=draw(st.integers(2, 9)),
        values=draw(st.integers(2, min(12, len(SYMBOLS) // pairs - 1))),
        distance=2 * rewrites + draw(st.integers(0, 30)),
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


def facts_at_the_end(opening):
    """[(key, value)] of an opening; if it has fewer facts than others, marks come first."""
    marks = len(list(takewhile(MARKS.__contains__, opening)))
    facts = opening[marks:]
    assert not MARKS & set(facts)
    return list(zip(facts[::2], facts[1::2], strict=True))


def facts_in(filler):
    """[(key, value)] of the facts that stand in a filler, in order."""
    places = [at for at, byte in enumerate(filler) if byte not in MARKS]
    for key, value in zip(places[::2], places[1::2], strict=True):
        assert value == key + 1, "a value follows its key"
    return [(filler[at], filler[at + 1]) for at in places[::2]]


@given(drawn())
def test_an_answer_is_what_the_document_told_last(config_and_document):
    """An oracle reads the document and answers.

    A document is: [marks] facts | filler with changed facts | questions `? key`.
    """
    config, document = config_and_document
    distance = distance_of(config, document)
    parts = np.split(document.inputs, [config.opening, config.opening + distance])
    opening, filler, rest = (part.tolist() for part in parts)
    told = facts_at_the_end(opening)
    changes = facts_in(filler)
    known = dict(told) | dict(changes)

    assert len(told) == len(dict(told)), "each key is told once"
    assert config.vary_pairs or len(told) == config.pairs
    keys = SYMBOLS[::-1][: len(told)].tolist()
    assert set(known) == set(keys), "only a fact of the opening changes"
    assert len(changes) == config.rewrites
    asked = document.inputs[document.scored].tolist()
    assert document.targets[document.scored].tolist() == [known[key] for key in asked]
    assert not set(known.values()) & MARKS
    assert set(rest) <= MARKS | set(known), "the questions hold no answer"


@given(drawn())
def test_a_document_has_the_sizes_of_its_config(config_and_document):
    config, document = config_and_document
    for field in (document.inputs, document.targets, document.scored):
        assert len(field) == config.length
    asked = np.flatnonzero(document.scored)  # places of the questions' keys
    assert len(asked) == config.questions
    assert (np.diff(asked) == config.spacing).all()
    assert (document.inputs[asked - 1] == ASK).all()
    distance = distance_of(config, document)
    assert 2 * config.rewrites <= distance <= config.distance
    assert config.vary_distance or distance == config.distance


def test_only_training_documents_vary_in_distance():
    config = RecallConfig(vary_distance=True, distance=9, questions=3)
    found = {}
    for split in SPLITS:
        found[split] = {distance_of(config, each) for each in documents(config, 200, split)}
    assert found == {"train": set(range(10)), "valid": {9}, "test": {9}}


def test_only_training_documents_vary_in_facts():
    config = RecallConfig(vary_pairs=True, pairs=9, values=2, questions=99, distance=5)
    counts = set()  # of keys that are asked for, which are all that were told
    for document in documents(config, 400):
        counts.add(len(set(document.inputs[document.scored].tolist())))
    assert counts == set(range(1, 10))
    for document in documents(config, 64, "test"):
        assert not set(document.inputs[: config.opening].tolist()) & MARKS


def test_documents_depend_on_split_and_number_alone():
    splits = {split: RecallDocuments(RecallConfig(), split) for split in SPLITS}
    assert [len(splits[split]) for split in SPLITS] == [100_000, 64, 64]
    assert splits["test"].lengths.tolist() == [len(document.inputs) for document in splits["test"]]
    inputs = splits["train"][3].inputs
    assert (inputs == RecallDocuments(RecallConfig(), "train")[3].inputs).all()
    for other in (splits["train"][2], splits["valid"][3], splits["test"][3]):
        assert (inputs != other.inputs).any()


REWRITTEN = {"distance": 16, "rewrites": 3, "pairs": 6, "vary_pairs": True}
PUBLISHED = [  # (changes of the config, number of a document, its tokens, its answers)
    ({"distance": 30}, 1, b"DNBeA8Ck?C/+?A_&?D;:?B-:.;,+-!_-//,=<&!&=))(>,<;=;:!!.", b"k8Ne"),
    (REWRITTEN, 3, b"!.!>CnBeDOA9(BcA2*&_(DN?B_=?D:*?C,/?C=);,=!)", b"cNnn"),
]


@pytest.mark.parametrize(
    "changes, number, inputs, answers", PUBLISHED, ids=["facts", "rewritten facts"]
)
def test_a_document_is_the_one_that_published_numbers_were_measured_on(
    changes, number, inputs, answers
):
    """To the byte: a change of how a document is drawn would change the data unnoticed."""
    config = RecallConfig(questions=4, vary_distance=True, **changes)
    document = RecallDocuments(config, "train")[number]
    assert bytes(document.inputs) == inputs
    assert bytes(document.targets[document.scored]) == answers


@pytest.mark.parametrize("name", LEAST)
def test_a_size_that_is_too_small_is_refused(name):
    least = {"pairs": 1, "values": 2, "rewrites": 0, "questions": 1, "distance": 0, "spacing": 2}
    words = f"{name} is {least[name] - 1}; it must be at least {least[name]}"
    with pytest.raises(ValueError, match=words):
        RecallConfig(**{name: least[name] - 1})


def test_what_a_document_cannot_hold_is_refused():
    assert len(set(SYMBOLS.tolist())) == len(SYMBOLS)
    with pytest.raises(ValueError, match="pairs is 1: with"):
        RecallConfig(pairs=1, values=len(SYMBOLS))
    with pytest.raises(ValueError, match="distance is 88; what stands in the filler needs 90"):
        RecallConfig(rewrites=45)
