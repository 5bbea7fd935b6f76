"""The recall task: answers follow from what a document told, and are never in its input."""

import hashlib
from itertools import dropwhile, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.recall import (
    ASK,
    FILLER,
    SYMBOLS,
    TELL,
    RecallConfig,
    RecallDocuments,
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


@st.composite
def drawn_anew(draw):
    """A config whose facts are drawn anew, a document of it, and whether it is for training."""
    rewrites = draw(st.integers(0, 5))
    config = RecallConfig(
        anew=True,
        pairs=draw(st.integers(1, 6)),
        vary_pairs=draw(st.booleans()),
        values=draw(st.integers(2, 12)),
        questions=draw(st.integers(1, 9)),
        spacing=draw(st.integers(2, 5)),
        begin=draw(st.integers(0, 20)),
        distance=3 * rewrites + draw(st.integers(0, 20)),
        vary_distance=draw(st.booleans()),
        rewrites=rewrites,
        distractors=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )
    training = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return config, recall_document(config, rng, "x", training), training


def told_and_answered(document):
    """What a register makes of a document: (facts as they are told, its answers).

    It keeps the last value that was told of each key, which is all that the task asks for.
    """
    facts = []
    answers = []
    register = {}
    tokens = document.inputs.tolist()
    for place, token in enumerate(tokens):
        if token == TELL:
            _, key, value = tokens[place : place + 3]
            register[key] = value
            facts.append((key, value))
        if token == ASK:
            answers.append(register[tokens[place + 1]])
    return facts, answers


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
    assert config.vary_pairs or len(known) == config.pairs, "so many facts are told"
    assert {*known} == {*SYMBOLS[::-1][: len(known)].tolist()}, "keys are the last symbols"
    assert not {*known.values()} & (MARKS | {*known}), "a value is no key and no mark"
    assert {*filler} <= MARKS, "filler is made of marks"
    assert {*rest} <= MARKS | {*known}, "the questions hold no answer"
    asked = document.inputs[document.scored].tolist()
    answers = dict(zip(asked, document.targets[document.scored].tolist(), strict=True))
    assert answers == {key: known[key] for key in asked}, "an answer is what was told of its key"


@given(drawn_anew())
def test_a_register_answers_every_question_of_facts_drawn_anew(drawn):
    """So the best score is 100%, whatever is told again, and wherever it stands among noise."""
    config, document, training = drawn
    facts, answers = told_and_answered(document)
    assert document.targets[document.scored].tolist() == answers, "the register answers otherwise"
    sizes = {"questions": len(answers), "length": len(document.inputs)}
    assert sizes == {"questions": config.questions, "length": config.length}
    keys = {key for key, _ in facts}
    assert len({key for key, _ in facts[: len(keys)]}) == len(keys), "each is told, then some again"
    assert not keys & {value for _, value in facts}, "a key is no value"
    latest = {}
    for key, value in facts:
        assert latest.get(key) != value, "what is told again is told with another value"
        latest[key] = value
    if not (training and config.vary_pairs):
        assert len(keys) == config.pairs, "so many facts are told"
    again = len(facts) - len(keys)
    is_right = again <= config.rewrites if training else again == config.rewrites
    assert is_right, f"{again} facts are told again, of {config.rewrites} rewrites"


def test_documents_depend_on_split_and_number_alone():
    splits = {split: RecallDocuments(RecallConfig(), split) for split in SPLITS}
    assert [len(splits[split]) for split in SPLITS] == [100_000, 64, 64]
    assert splits["test"].lengths.tolist() == [len(document.inputs) for document in splits["test"]]
    inputs = splits["train"][3].inputs
    assert (inputs == RecallDocuments(RecallConfig(), "train")[3].inputs).all()
    for other in (splits["train"][2], splits["valid"][3], splits["test"][3]):
        assert (inputs != other.inputs).any()


DIGESTS = {  # of 64 documents of each split, as published numbers were measured on them
    "1bb89cee247d8deb": {},
    "819f904b1252b9f7": {"own_values": True, "vary_pairs": True},
    "7b2bc469ebf34888": {"pairs": 9, "vary_distance": True, "spacing": 3, "questions": 16},
    "622ead61994a0795": {"anew": True, "distance": 40, "distractors": 0.3, "rewrites": 5},
    "32393c5fef13cc61": {
        "anew": True,
        "distance": 9,
        "begin": 9,
        "vary_pairs": True,
        "vary_distance": True,
    },
}


@pytest.mark.parametrize("digest", DIGESTS)
def test_documents_are_to_the_byte_those_that_published_numbers_were_measured_on(digest):
    """A change of how a document is drawn would change the data unnoticed."""
    config = RecallConfig(**DIGESTS[digest])
    found = hashlib.sha256()
    for split in SPLITS:
        for document in documents(config, 64, split):
            for field in document[1:]:
                found.update(field.tobytes())
    now = found.hexdigest()[:16]
    assert now == digest, f"{DIGESTS[digest]} draws other documents (digest {now})"
