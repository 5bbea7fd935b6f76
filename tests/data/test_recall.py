"""The recall task: answers follow from what a document told, as an oracle reads it, and are never in the input."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.recall import (
    ASK,
    FILLER,
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
    pairs, rewrites = draw(st.integers(1, 20)), draw(st.integers(0, 9))
    sizes = {
        "pairs": pairs,
        "rewrites": rewrites,
        "questions": draw(st.integers(1, 9)),
        "spacing": draw(st.integers(2, 9)),
    }
    sizes |= {
        "values": draw(st.integers(2, min(12, len(SYMBOLS) // pairs - 1))),
        "distance": 2 * rewrites + draw(st.integers(0, 30)),
    }
    config = RecallConfig(
        vary_pairs=draw(st.booleans()), vary_distance=draw(st.booleans()), **sizes
    )
    return config, recall_document(
        config, np.random.default_rng(draw(st.integers(0, 99))), "x", training=True
    )


def documents(config, count, split="train"):
    """The first `count` documents of a split."""
    return list(islice(RecallDocuments(config, split), count))


def distance_of(config, document):
    """Tokens between the last fact of the opening and the first question."""
    return int(np.flatnonzero(document.scored)[0]) - 1 - config.opening


def changes_in(filler):
    """The facts that stand in a filler, in order: [(key, value)]."""
    places = [at for at, byte in enumerate(filler) if byte not in MARKS]
    assert all(value == key + 1 for key, value in zip(places[::2], places[1::2], strict=True)), (
        "a value follows its key"
    )
    return [(filler[at], filler[at + 1]) for at in places[::2]]


@given(drawn())
def test_an_answer_is_what_the_document_told_last(config_and_document):
    """A document is: [marks] facts | filler with changed facts | questions `? key`. An oracle reads it and answers."""
    config, document = config_and_document
    assert len(document.inputs) == len(document.targets) == len(document.scored) == config.length
    asked, distance = (
        np.flatnonzero(document.scored),
        distance_of(config, document),
    )  # asked: places of the questions' keys
    assert len(asked) == config.questions and (np.diff(asked) == config.spacing).all()
    assert 2 * config.rewrites <= distance <= config.distance and (
        config.vary_distance or distance == config.distance
    )
    assert (document.inputs[asked - 1] == ASK).all()
    opening, filler, rest = (
        part.tolist()
        for part in np.split(document.inputs, [config.opening, config.opening + distance])
    )
    facts = opening[next((at for at, byte in enumerate(opening) if byte not in MARKS), 0) :]
    assert len(opening) == config.opening and (facts == opening or config.vary_pairs), (
        "of fewer facts, marks come first"
    )
    known, changes = dict(zip(facts[::2], facts[1::2], strict=True)), changes_in(filler)
    assert sorted(known) == sorted(SYMBOLS[::-1][: len(known)].tolist()) and 2 * len(known) == len(
        facts
    ), "each key once"
    assert len(changes) == config.rewrites and {key for key, _ in changes} <= {*known}, (
        "only a fact of the opening changes"
    )
    known |= dict(changes)
    assert document.targets[asked].tolist() == [
        known[key] for key in document.inputs[asked].tolist()
    ]
    assert not {*known.values()} & MARKS and {*rest} <= MARKS | {*known}, (
        "the questions hold no answer"
    )


def test_only_training_documents_vary_in_distance_and_facts():
    config = RecallConfig(vary_distance=True, distance=9, questions=3)
    first = {
        split: {distance_of(config, document) for document in documents(config, 200, split)}
        for split in SPLITS
    }
    assert first == {"train": {*range(10)}, "valid": {9}, "test": {9}}
    config = RecallConfig(vary_pairs=True, pairs=9, values=2, questions=99, distance=5)
    asked = {
        len({*document.inputs[document.scored].tolist()}) for document in documents(config, 400)
    }
    assert asked == {*range(1, 10)}, "every one is asked for"
    assert (
        not {
            byte
            for d in documents(config, 64, "test")
            for byte in d.inputs[: config.opening].tolist()
        }
        & MARKS
    )


def test_documents_depend_on_split_and_number_alone():
    splits = {split: RecallDocuments(RecallConfig(), split) for split in SPLITS}
    assert [len(splits[split]) for split in SPLITS] == [100_000, 64, 64]
    assert splits["test"].lengths.tolist() == [len(document.inputs) for document in splits["test"]]
    same = splits["train"][3].inputs
    assert (same == RecallDocuments(RecallConfig(), "train")[3].inputs).all()
    assert not any(
        (same == d.inputs).all()
        for d in (splits["train"][2], splits["valid"][3], splits["test"][3])
    )


REWRITTEN = {"distance": 16, "rewrites": 3, "pairs": 6, "vary_pairs": True}
PUBLISHED = [  # (changes of the config, number of a document, its tokens, its answers)
    ({"distance": 30}, 1, b"DNBeA8Ck?C/+?A_&?D;:?B-:.;,+-!_-//,=<&!&=))(>,<;=;:!!.", b"k8Ne"),
    (REWRITTEN, 3, b"!.!>CnBeDOA9(BcA2*&_(DN?B_=?D:*?C,/?C=);,=!)", b"cNnn"),
]


@pytest.mark.parametrize(
    "changes,number,inputs,answers", PUBLISHED, ids=["facts", "rewritten facts"]
)
def test_a_document_is_the_one_that_published_numbers_were_measured_on(
    changes, number, inputs, answers
):
    """To the byte: a change of how facts, changes, places, distances or questions are drawn would change the data unnoticed."""
    document = RecallDocuments(RecallConfig(questions=4, vary_distance=True, **changes), "train")[
        number
    ]
    assert bytes(document.inputs) == inputs and bytes(document.targets[document.scored]) == answers


def test_what_a_task_cannot_hold_is_refused():
    assert len({*SYMBOLS.tolist()}) == len(SYMBOLS)
    for change, words in (
        *(
            ({name: least - 1}, f"{name} is {least - 1}; it must be at least {least}")
            for name, least in (
                ("pairs", 1),
                ("values", 2),
                ("rewrites", 0),
                ("questions", 1),
                ("distance", 0),
                ("spacing", 2),
            )
        ),
        ({"pairs": 1, "values": len(SYMBOLS)}, "pairs is 1: with"),
        ({"rewrites": 45}, "distance is 88; what stands in the filler needs 90"),
    ):
        with pytest.raises(ValueError, match=words):
            RecallConfig(**change)
