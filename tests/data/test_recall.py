"""The recall task: answers follow from what a document told, and are never in its input."""

import hashlib
from itertools import dropwhile, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.recall import (
    ALPHABET,
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


@given(drawn_anew())
def test_a_document_drawn_anew_has_its_parts_where_its_config_says(drawn):
    """Filler, facts, filler in which facts are told again, questions; only training varies."""
    config, document, training = drawn
    first_fact = int(np.flatnonzero(document.inputs == TELL)[0])
    facts, _ = told_and_answered(document)
    opened = first_fact + 3 * len({key for key, _ in facts})
    distance = int(np.flatnonzero(document.inputs == ASK)[0]) - opened
    begin = opened - 3 * config.pairs
    found = {"begin": begin, "distance": distance}
    most = {"begin": config.begin, "distance": config.distance}
    assert all(0 <= found[name] <= most[name] for name in found), f"{found}, at most {most}"
    assert training or found == most, "only training varies"


def filler_of(document):
    """The tokens of a document that are no part of a fact or a question."""
    inputs = document.inputs
    part = np.zeros(len(inputs), bool)
    for sign, length in ((TELL, 3), (ASK, 2)):
        for place in np.flatnonzero(inputs == sign):
            part[place : place + length] = True
    return inputs[~part]


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_distractors_are_that_share_of_the_filler(share):
    config = RecallConfig(anew=True, begin=3000, distance=3000, rewrites=9, distractors=share)
    [document] = documents(config, 1, "test")
    signs = ALPHABET[: config.pairs + config.values].tolist()
    found = np.isin(filler_of(document), signs)
    assert abs(found.mean() - share) < 0.03, "the share of distractors in the filler"
    assert {*filler_of(document)[found].tolist()} in ({*signs}, set()), "any sign may distract"
    assert {*filler_of(document)[~found].tolist()} <= {*FILLER.tolist()}


def test_a_byte_is_a_key_in_one_document_and_a_value_in_another():
    config = RecallConfig(anew=True)
    told = [told_and_answered(document)[0] for document in documents(config, 200)]
    signs = {*ALPHABET[: config.pairs + config.values].tolist()}
    assert {key for facts in told for key, _ in facts} == signs, "a sign is never a key"
    assert {value for facts in told for _, value in facts} == signs, "a sign is never a value"


def test_training_draws_where_facts_begin_and_how_many_are_told_again():
    config = RecallConfig(anew=True, begin=3, rewrites=2)
    for split in SPLITS:
        begins = set()
        again = set()
        for document in documents(config, 60, split):
            begins.add(int(np.flatnonzero(document.inputs == TELL)[0]))
            again.add(len(told_and_answered(document)[0]) - config.pairs)
        found = {"begin": begins, "told again": again}
        drawn = {"begin": {0, 1, 2, 3}, "told again": {0, 1, 2}}
        fixed = {"begin": {3}, "told again": {2}}
        assert found == (drawn if split == "train" else fixed), split


@given(drawn())
def test_a_document_has_the_sizes_of_its_config(config_and_document):
    config, document = config_and_document
    assert {len(field) for field in document[1:]} == {config.length}, "tokens of a document"
    asked = np.flatnonzero(document.scored)  # places of the questions' keys
    assert len(asked) == config.questions, "questions of a document"
    assert (np.diff(asked) == config.spacing).all(), "tokens from question to question"
    assert (document.inputs[asked - 1] == ASK).all(), "a sign stands before each question's key"
    distance = distance_of(config, document)
    assert 0 <= distance <= config.distance, "tokens between facts and questions"
    assert config.vary_distance or distance == config.distance, "it varies, and should not"


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


DIGESTS = {  # of 64 documents of each split, as published numbers were measured on them
    "1bb89cee247d8deb": {},
    "819f904b1252b9f7": {"own_values": True, "vary_pairs": True},
    "7b2bc469ebf34888": {"pairs": 9, "vary_distance": True, "spacing": 3, "questions": 16},
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


def test_what_a_document_cannot_hold_is_refused():
    assert len(set(SYMBOLS.tolist())) == len(SYMBOLS)
    room = len(SYMBOLS) - 3
    assert RecallConfig(pairs=3, values=room)
    for own_values, values in ((False, room + 1), (True, room // 3 + 1)):
        with pytest.raises(ValueError, match="pairs is 3: with"):
            RecallConfig(pairs=3, values=values, own_values=own_values)
