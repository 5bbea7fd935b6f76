"""The recall task: answers follow from what a document told, and are never in its input."""

import hashlib
from itertools import dropwhile, islice

import pytest

from accelerated.data.recall import (
    ASK,
    FILLER,
    TELL,
    RecallConfig,
    RecallDocuments,
)
from accelerated.data.windows import SPLITS

MARKS = FILLER.tolist()


DIGESTS = {  # of 64 documents of each split; of the first three published numbers are
    "1bb89cee247d8deb": {},
    "819f904b1252b9f7": {"own_values": True, "vary_pairs": True},
    "7b2bc469ebf34888": {"pairs": 9, "vary_distance": True, "spacing": 3, "questions": 16},
    "622ead61994a0795": {"anew": True, "distance": 40, "distractors": 0.3, "rewrites": 5},
    "991dd029f6cbeae1": {"anew": True, "begin": 9, "vary_pairs": True, "vary_distance": True},
    "c9d1278a9c024c88": {
        "anew": True,
        "pairs": 1,
        "distance": 15,
        "rewrites": 5,
        "distractors": 1.0,
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


def told_and_answered(config, document):
    """What a register makes of a document: (facts as they are told, its answers).

    It keeps the last value that was told of each key, which is all that the task asks for. A
    document is: [marks] facts | filler | questions `? key`. Marks stand for facts that it lacks.
    """
    tokens = document.inputs.tolist()
    facts = []
    if not config.anew:
        told = [*dropwhile(MARKS.__contains__, tokens[: config.opening])]
        facts += zip(told[::2], told[1::2], strict=True)
    register = dict(facts)
    answers = []
    for place, token in enumerate(tokens):
        if token == TELL:
            _, key, value = tokens[place : place + 3]
            register[key] = value
            facts.append((key, value))
        if token == ASK:
            answers.append(register[tokens[place + 1]])
    return facts, answers


def documents(config, count, split):
    """The first `count` documents of a split."""
    return list(islice(RecallDocuments(config, split), count))


@pytest.mark.parametrize("digest", DIGESTS)
def test_a_register_answers_every_question(digest):
    """So the best score is 100%, whatever is told again, and wherever it stands among noise."""
    config = RecallConfig(**DIGESTS[digest])
    drawn = [(document, split) for split in SPLITS for document in documents(config, 20, split)]
    for document, split in drawn:
        training = split == "train"
        facts, answers = told_and_answered(config, document)
        assert document.targets[document.scored].tolist() == answers, "the register says another"
        sizes = {"questions": len(answers), "length": len(document.inputs)}
        assert sizes == {"questions": config.questions, "length": config.length}, (
            "the questions, or the tokens, of a document"
        )
        keys = {key for key, _ in facts}
        assert len({key for key, _ in facts[: len(keys)]}) == len(keys), "first all are told"
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


def test_a_split_knows_its_documents_and_their_lengths():
    splits = {split: RecallDocuments(RecallConfig(), split) for split in SPLITS}
    assert [len(splits[split]) for split in SPLITS] == [100_000, 64, 64]
    assert splits["test"].lengths.tolist() == [len(document.inputs) for document in splits["test"]]
