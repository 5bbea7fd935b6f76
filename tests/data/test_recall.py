"""The recall tasks' questions can be answered only from memory."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.recall import (
    ASK,
    FILLER,
    GOES,
    OBJECTS,
    PEOPLE,
    PLACES,
    SYMBOLS,
    TAKES,
    RecallConfig,
    RecallDocuments,
    places_in_filler,
    recall_document,
)
from accelerated.data.windows import SPLITS
from accelerated.training.settings import preset_settings

MARKS = {ASK, *FILLER.tolist()}
seeds = st.integers(0, 99)


@st.composite
def configs(draw, task, pairs):
    """A config of a task with room for what stands in its filler."""
    count, questions = draw(pairs), draw(st.integers(1, 9))
    sizes = {"pairs": count, "questions": min(questions, count) if task == "copying" else questions}
    if task == "facts":
        shared = draw(st.booleans())
        most = len(SYMBOLS) - count if shared else len(SYMBOLS) // count - 1
        sizes |= {"rewrites": draw(st.integers(0, 9)), "shared_values": shared, "values": draw(st.integers(2, min(12, most)))}
    least = RecallConfig(task=task, distance=999, **sizes).in_filler
    return RecallConfig(task=task, distance=least + draw(st.integers(0, 30)), spacing=draw(st.integers(2, 9)), **sizes)


def parts(config, seed):
    """(opening, filler, places of the answers in the rest of the document, document) of one document."""
    document = recall_document(config, np.random.default_rng(seed), "x")
    assert len(document.inputs) == len(document.targets) == len(document.scored) == config.length
    begin = config.opening + config.distance
    asked = np.flatnonzero(document.scored)
    assert len(asked) == config.questions and (np.diff(asked) == config.spacing).all()
    assert asked[0] - begin == (0 if config.task == "copying" else 1), "after the filler, at the question's last byte"
    assert (document.inputs[begin :: config.spacing][: config.questions] == ASK).all()
    return document.inputs[: config.opening].tolist(), document.inputs[config.opening : begin].tolist(), asked, document


@given(configs("facts", st.integers(1, 64)), seeds)
def test_a_fact_is_what_the_opening_or_the_last_change_says(config, seed):
    opening, filler, asked, document = parts(config, seed)
    known = dict(zip(opening[::2], opening[1::2], strict=True))
    assert len(known) == config.pairs and not {*known, *known.values()} & MARKS
    changes = [at for at, byte in enumerate(filler) if byte in known and filler[at - 1] not in known]
    assert len(changes) <= config.rewrites and sum(byte not in MARKS for byte in filler) == 2 * config.rewrites
    at = 0
    while at < len(filler):
        if filler[at] in MARKS:
            at += 1
            continue
        known[filler[at]] = filler[at + 1]
        at += 2
    assert {*document.inputs[config.opening + config.distance :].tolist()} <= MARKS | {*known}, "no answer is in the input"
    for place in asked:
        assert document.targets[place] == known[document.inputs[place]]


@given(configs("facts", st.integers(1, 64)), seeds)
def test_keys_have_values_of_their_own_unless_they_share_them(config, seed):
    of_key = {}
    for number in range(20):
        opening = recall_document(config, np.random.default_rng([seed, number]), "x").inputs[: config.opening].tolist()
        for key, value in zip(opening[::2], opening[1::2], strict=True):
            of_key.setdefault(key, set()).add(value)
    sets = list(of_key.values())
    assert not {*of_key} & set.union(*sets), "keys are no values"
    if config.shared_values:
        assert len(set.union(*sets)) <= config.values
    else:
        assert sum(map(len, sets)) == len(set.union(*sets)) and max(map(len, sets)) <= config.values


@given(configs("copying", st.integers(1, 20)), seeds)
def test_copying_asks_for_the_values_in_their_order(config, seed):
    _, filler, asked, document = parts(config, seed)
    values = [byte for byte in filler if byte not in MARKS]
    assert len(values) == config.pairs and {*values} <= {*PLACES.tolist()}
    assert document.targets[asked].tolist() == values[: config.questions]
    assert {*document.inputs[config.distance :].tolist()} <= MARKS


def told(filler):
    """The statements [(person, mark, what)] that stand in a filler."""
    at = [place for place, byte in enumerate(filler) if byte in PEOPLE.tolist()]
    return [tuple(filler[place : place + 3]) for place in at]


@given(configs("one_fact", st.integers(1, 20)), seeds)
def test_one_fact_asks_where_somebody_went_last(config, seed):
    _, filler, asked, document = parts(config, seed)
    statements = told(filler)
    assert len(statements) == config.pairs and all(mark == GOES for _, mark, _ in statements)
    now = {person: place for person, _, place in statements}
    for place in asked:
        assert document.targets[place] == now[document.inputs[place]]
    assert {*now.values()} <= {*PLACES.tolist()}


@given(configs("two_facts", st.integers(4, 20)), seeds)
def test_two_facts_asks_where_the_last_taker_is_now(config, seed):
    _, filler, asked, document = parts(config, seed)
    statements = told(filler)
    assert len(statements) == config.pairs
    place_of, taker_of = {}, {}
    for person, mark, what in statements:
        assert mark in (GOES, TAKES) and what in (PLACES if mark == GOES else OBJECTS)
        (place_of if mark == GOES else taker_of)[what if mark == TAKES else person] = person if mark == TAKES else what
    for place in asked:
        assert document.targets[place] == place_of[taker_of[document.inputs[place]]]


@given(configs("two_facts", st.integers(4, 20)), seeds)
def test_two_facts_ask_for_objects_in_two_places_at_least(config, seed):
    document = recall_document(dataclasses.replace(config, questions=99), np.random.default_rng(seed), "x")
    assert len({*document.targets[document.scored].tolist()}) > 1


@pytest.mark.parametrize("task", ["facts", "copying", "one_fact", "two_facts"])
def test_everything_that_can_be_told_is_told_and_asked(task):
    """Each with about its share: no guess is better than another."""
    config = RecallConfig(task=task, pairs=8, questions=8, rewrites=8 if task == "facts" else 0, distance=99)
    documents = [recall_document(config, np.random.default_rng([1, n]), "x") for n in range(400)]
    answers = np.concatenate([document.targets[document.scored] for document in documents])
    _, counts = np.unique(answers, return_counts=True)
    assert len(counts) == (10 if task != "facts" else 80) and counts.max() < 5 * counts.min()
    if task == "facts":
        filler = np.concatenate([document.inputs[config.opening : -8 * config.spacing] for document in documents])
        assert all((filler == key).sum() > 200 for key in SYMBOLS[::-1][:8]), "any key may change"
        return
    statements = [told(document.inputs.tolist()) for document in documents]
    if task != "copying":
        people = [person for told_once in statements for person, *_ in told_once]
        assert all(people.count(person) > 500 for person in PEOPLE.tolist())
    if task == "two_facts":
        again = [len([1 for who, mark, _ in told_once if mark == GOES and who == told_once[0][0]]) for told_once in statements]
        assert sum(count > 1 for count in again) > 100, "who took something may go on"


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 20), seeds)
def test_pieces_in_the_filler_do_not_overlap(count, width, more, seed):
    at = places_in_filler(count, width, count * width + more, np.random.default_rng(seed))
    assert len(at) == count and (np.diff(at) >= width).all()
    assert not count or (at[0] >= 0 and at[-1] + width <= count * width + more)


def test_pieces_stand_everywhere_in_the_filler():
    rng = np.random.default_rng(0)
    places = np.concatenate([places_in_filler(2, 3, 12, rng) for _ in range(300)])
    assert set(places.tolist()) == set(range(10))


@given(configs("facts", st.integers(1, 20)) | configs("one_fact", st.integers(1, 9)), seeds)
def test_a_varied_distance_is_drawn_and_the_rest_is_filler(config, seed):
    varied = dataclasses.replace(config, vary_distance=True)
    document = recall_document(varied, np.random.default_rng(seed), "x", training=True)
    asked = np.flatnonzero(document.scored)
    assert len(document.inputs) == config.length and len(asked) == config.questions and (np.diff(asked) == config.spacing).all()
    distance = asked[0] - 1 - config.opening
    assert config.in_filler <= distance <= config.distance
    filler = document.inputs[config.opening : config.opening + distance].tolist()
    assert sum(byte not in {*FILLER.tolist()} for byte in filler) == config.in_filler
    assert {*document.inputs[asked[-1] + 1 :].tolist()} <= {*FILLER.tolist()}


def test_only_training_documents_vary_their_distance_over_all_of_it():
    config = RecallConfig(vary_distance=True, distance=9, questions=3, documents=200)
    of_split = {split: RecallDocuments(config, split) for split in SPLITS}
    first = {
        split: {int(np.flatnonzero(d.scored)[0]) - 1 - config.opening for d in documents} for split, documents in of_split.items()
    }
    assert first == {"train": {*range(10)}, "valid": {9}, "test": {9}}
    fixed = RecallDocuments(dataclasses.replace(config, vary_distance=False), "train")
    assert {int(np.flatnonzero(document.scored)[0]) for document in fixed} == {config.opening + 9 + 1}
    config = RecallConfig(vary_distance=True, distance=99, questions=3, documents=400)
    drawn = [int(np.flatnonzero(document.scored)[0]) - 1 - config.opening for document in RecallDocuments(config, "train")]
    assert 0.4 < np.mean(np.array(drawn) < 9) < 0.6, "half of them on half of the logarithmic scale"


def test_training_documents_may_have_fewer_facts_which_stand_before_the_filler():
    config = RecallConfig(vary_pairs=True, pairs=9, values=2, questions=99, distance=5, documents=400)
    counts = []
    for document in RecallDocuments(config, "train"):
        opening = document.inputs[: config.opening].tolist()
        facts = [byte for byte in opening if byte not in MARKS]
        assert opening[len(opening) - len(facts) :] == facts
        known = dict(zip(facts[::2], facts[1::2], strict=True))
        assert {*known} == {*SYMBOLS[::-1][: len(known)].tolist()}, "the same keys that so many facts always have"
        asked, answers = document.inputs[document.scored].tolist(), document.targets[document.scored].tolist()
        assert {*asked} == {*known} and all(known[key] == answer for key, answer in zip(asked, answers, strict=True))
        assert np.flatnonzero(document.scored)[0] == config.opening + config.distance + 1
        counts.append(len(known))
    assert {*counts} == {*range(1, 10)} and 0.4 < np.mean(np.array(counts) < 3) < 0.55, "evenly on a logarithmic scale"
    for document in RecallDocuments(config, "test"):
        assert not {*document.inputs[: config.opening].tolist()} & MARKS


def test_every_question_of_a_story_is_asked():
    document = recall_document(RecallConfig(pairs=3, questions=200, distance=0), np.random.default_rng(0), "x")
    assert {*document.inputs[document.scored].tolist()} == {*b"ABC"}


def test_documents_depend_on_split_and_number_alone():
    splits = {split: RecallDocuments(RecallConfig(documents=5), split) for split in SPLITS}
    assert len(splits["train"]) == 5 and len(splits["valid"]) == 64
    same = [(splits["train"][3].inputs == RecallDocuments(RecallConfig(documents=5), "train")[3].inputs).all()]
    other = [(splits["train"][3].inputs == d.inputs).all() for d in (splits["train"][2], splits["valid"][3], splits["test"][3])]
    assert all(same) and not any(other)
    with pytest.raises(IndexError):
        splits["train"][5]
    assert len(list(RecallDocuments(RecallConfig(documents=3), "train"))) == 3


@pytest.mark.parametrize(
    ("task", "inputs", "answers"),
    [
        ("facts", b"DNBeA8Ck?C/+?A_&?D;:?B-:.;,+-!_-//,=<&!&=))(>,<;=;:!!.", b"k8Ne"),
        ("copying", b">((-840::3+?-)/?>!_?.+;?<+-:.;,+-!_-//,=<&!&=)", b"8403"),
        ("one_fact", b"D@7B@5A@6B@2?A_&?A;:?D-:?B,+-!_-//,=<&!&=))(>,", b"6672"),
        ("two_facts", b"B@0C@3C^y/B^z?z&=?z(>?y;=?z!!.(:<.&-<-.&+=+)&*", b"0030"),
    ],
)
def test_documents_are_those_that_published_numbers_were_measured_on(task, inputs, answers):
    config = RecallConfig(task=task, questions=4, distance=30, vary_distance=True)
    document = RecallDocuments(config, "train")[1]
    assert (bytes(document.inputs), bytes(document.targets[document.scored])) == (inputs, answers)


def test_values_and_keys_are_uniform():
    documents = list(RecallDocuments(RecallConfig(documents=600), "train"))
    counts = np.bincount(np.concatenate([d.targets[d.scored] for d in documents]), minlength=256)
    counts = counts[counts > 0]
    assert len(counts) == 40 and counts.min() > 0.6 * counts.mean() and counts.max() < 1.4 * counts.mean()
    assert len({*SYMBOLS.tolist()}) == len(SYMBOLS) and not {*SYMBOLS.tolist()} & MARKS and RecallConfig().chance == 0.1


def test_the_default_distance_is_beyond_reach_and_the_first_segment():
    """The reach of the preset's attention, W tokens per layer, and of one segment after the memory is cleared."""
    chosen = preset_settings("block_recurrent", "recall")
    model, task = chosen.model_config, chosen.recall
    assert task.distance > model.window * model.layers and 2 * task.pairs + task.distance >= model.segment


@pytest.mark.parametrize(
    "change",
    [
        {"task": "recall"},
        {"pairs": 0},
        {"pairs": 22},
        {"values": 1},
        {"rewrites": -1},
        {"questions": 0},
        {"distance": -1},
        {"spacing": 1},
        {"documents": 0},
    ],
)
def test_impossible_tasks_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(RecallConfig(), **change)


@pytest.mark.parametrize(
    "change",
    [
        {"documents": 1},
        {"pairs": 1, "values": len(SYMBOLS) - 1},
        {"task": "copying", "pairs": 300, "distance": 300},
        {"pairs": 100, "values": len(SYMBOLS) - 100, "shared_values": True},
    ],
)
def test_what_just_fits_is_a_task(change):
    RecallConfig(**change)


@pytest.mark.parametrize(
    ("task", "change", "words"),
    [
        ("facts", {"pairs": 22}, "pairs is 22: with 10 values they need 242 of 2.. bytes; give fewer of either$"),
        ("facts", {"rewrites": 45}, "distance is 88; what stands in the filler needs 90"),
        ("copying", {"questions": 4, "pairs": 89}, "distance is 88"),
        ("one_fact", {"pairs": 30}, "distance is 88"),
        ("copying", {"pairs": 3}, "questions is 24, more than the 3 values"),
        ("two_facts", {"pairs": 3}, "four statements"),
        ("one_fact", {"rewrites": 1}, "leave values, rewrites and vary_pairs out"),
        ("copying", {"values": 4, "questions": 4}, "leave"),
        ("two_facts", {"vary_pairs": True}, "leave"),
    ],
)
def test_what_a_task_cannot_hold_is_refused(task, change, words):
    with pytest.raises(ValueError, match=words):
        RecallConfig(**{"task": task} | change)
