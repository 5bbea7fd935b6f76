"""Table 3 of Adding Recurrence: questions of two hops, their reader, and the command."""

import itertools
import re
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import questions, reader, two_hops
from accelerated.lab.systems.two_hops import Question, f1, normalised
from tests.helpers.texts import MERGED

SEGMENT = 10
SIZES = questions.SIZES | {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TEXTS = st.text(st.sampled_from("the café.\n"), min_size=1, max_size=60)


@given(st.integers(0, 2**31))
def test_answers_follow_from_the_two_paragraphs(seed):
    """Name says who holds a thing, and File, after it, where every holder is."""
    [question] = two_hops.drawn(1, (2, 6), seed)
    assert two_hops.drawn(1, (2, 6), seed) == [question]
    paragraphs = dict(re.findall(r"^(Name|File)\n (.*)$", question.text, re.MULTILINE))
    assert question.text.index("Name") < question.text.index("File")
    lines = re.findall(r"^Test\n (.*)$", question.text, re.MULTILINE)
    assert 2 <= len(lines) <= 6
    assert {*lines} <= {*two_hops.LINES}

    thing, holder = paragraphs["Name"].removesuffix(".").split()
    places = dict(re.findall(r"(\w+) (\w+),", paragraphs["File"]))
    assert places.keys() == two_hops.PLACES.keys()
    assert all(place in two_hops.PLACES[own] for own, place in places.items())
    hops = [question.text[start:end] for start, end in question.hops]
    assert hops == [f" {thing} {holder}.", f" {holder} {places[holder]},"]

    asked, *guess = question.question.removesuffix("?").split()
    assert asked == thing
    if question.answer in ("yes", "no"):
        assert guess[0] in places.values()
        assert (question.answer == "yes") == (guess == [places[holder]])
    else:
        assert guess == []
        assert question.answer == places[holder]


def test_the_places_alone_say_nothing_of_the_answer():
    """No two holders share a place; every holder is as likely to be asked for.

    Other paragraphs have no word of the facts.
    """
    every = [*itertools.chain(*two_hops.PLACES.values())]
    assert len(set(every)) == len(every)
    others = {word.strip(".,") for word in " ".join(two_hops.LINES).split()}
    assert not {*every, *two_hops.PLACES} & {*two_hops.THINGS, *others}

    drawn = two_hops.drawn(4000, (2, 6), 0)
    answers = Counter(question.answer for question in drawn)
    facts_before = Counter()  # the fact that is asked for
    for question in drawn:
        start, _ = question.hops[1]
        facts_before[question.text[:start].rpartition("File\n")[2].count(",")] += 1
    assert {*facts_before} == {0, 1, 2, 3}
    assert min(facts_before.values()) > 900
    assert 400 < answers["yes"] < 600
    assert 400 < answers["no"] < 600


def test_answers_are_compared_as_hotpotqa_does():
    assert normalised(" The  Quick-brown an apple, A. ") == "quickbrown apple"
    assert normalised("7 a.m.") == "7 am", "punctuation goes first"
    harmonic = 2 * (2 / 3) * 0.5 / (2 / 3 + 0.5)
    assert f1("a b b c", "b b b d") == pytest.approx(harmonic), "precision 2/3, recall 1/2"
    for given_, answer in (("yes", "yes, indeed"), ("noanswer", "an answer"), ("no", "yes")):
        assert f1(given_, answer) == 0
    assert f1("", "the") == 0
    assert f1("Yes.", "yes") == 1
    assert f1("yes sir", "yes mam") == 0.5, "only a whole answer is yes"


@given(text=TEXTS, asked=TEXTS, segment=st.integers(6, 20))
def test_windows_hold_the_question_and_the_whole_text(text, asked, segment):
    example = reader.cut(Question(asked, text, "yes", ((0, len(text)),)), MERGED, segment)
    prefix = [reader.CLS, *(MERGED.encode(asked)[: segment // 2 - 2] + reader.FIRST), reader.SEP]
    ids = (MERGED.encode(text) + reader.FIRST).tolist()
    room = segment - len(prefix) - 1
    assert room >= segment / 2 - 1
    assert example.ends[-1] == len(text.encode())
    pieces = [ids[at : at + room] for at in range(0, len(ids), room)]
    for piece, window in zip(pieces, reader.batched([example]), strict=True):
        padding = [reader.PAD] * (room - len(piece))
        assert window.tokens[0].tolist() == [*prefix, *piece, reader.SEP, *padding]
        assert window.tokens[window.text].tolist() == piece
        assert (window.readable == (window.tokens != reader.PAD)).all()


@given(text=TEXTS, data=st.data(), segment=st.integers(6, 20))
def test_an_answers_tokens_are_the_fewest_that_spell_it(text, data, segment):
    """The text's bytes from the first of its tokens to the last; without either it is not whole."""
    begin = data.draw(st.integers(0, len(text) - 1))
    answer = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    example = reader.cut(Question("the", text, answer, ((0, len(text)),)), MERGED, segment)
    kind, first, last = example.answer
    assert kind == 0

    edges = [0, *example.ends.tolist()]  # of the tokens among the text's bytes
    before, _, _ = text.encode().partition(answer.encode())
    start, stop = np.searchsorted(np.flatnonzero(example.text), [first, last + 1])
    assert edges[start] <= len(before) < edges[start + 1]
    assert edges[stop - 1] < len(before) + len(answer.encode()) <= edges[stop]
    if stop - start <= reader.LONGEST:
        spans = np.zeros((2, example.text.size))
        spans[[0, 1], [first, last]] = 9
        spelled = text.encode()[edges[start] : edges[stop]].decode(errors="ignore").strip()
        assert reader.answer_text(example, spans, np.array([1.0, 0, 0])) == spelled


def test_yes_and_no_are_kinds_and_a_span_stands_in_the_last_supporting_sentence():
    """Though the text has these words, and the answer elsewhere too."""
    text = " yes, no, my cat, my dog, my cat. no cat"
    question = Question("x", text, "cat", ())
    starts = {  # {hops: the character at which the span begins}
        ((9, 17), (25, 33)): 29,
        ((25, 33), (17, 25)): 29,  # in the last one that has it
        ((17, 25),): 13,  # in none of them
    }
    for hops, start in starts.items():
        at = len(["<CLS>", "x", "<SEP>"]) + start  # each letter is a token
        found = reader.cut(question._replace(hops=hops), MERGED, 60)
        assert found.answer == (0, at, at + 2), hops
    for number, answer in enumerate(("yes", "no"), 1):
        example = reader.cut(question._replace(answer=answer), MERGED, 40)
        assert example.answer == (number, 0, 0)
        nowhere = np.zeros((2, example.text.size))
        assert reader.answer_text(example, nowhere, np.eye(3)[number]) == answer


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_the_best_span_is_the_best_of_all(length, longest, seed):
    start, end = np.random.default_rng(seed).normal(size=(2, length))
    spans = itertools.combinations_with_replacement(range(length), 2)
    allowed = [(first, last) for first, last in spans if last - first < longest]
    best = max(allowed, key=lambda span: start[span[0]] + end[span[1]])
    assert reader.best_span(start, end, longest) == best


@pytest.fixture
def small(monkeypatch):
    """The task of small texts and models."""
    changed = {
        "SIZES": SIZES,
        "STAGES": (((0, 1), 1), ((2, 3), 2)),
        "QUESTIONS": (20, 10),
        "make_task": questions.make_task.__wrapped__,
        "train_bpe": lambda source, vocabulary: MERGED,
    }
    for name, value in changed.items():
        monkeypatch.setattr(questions, name, value)


def small_examples(count):
    """Examples of questions on short texts."""
    questions = two_hops.drawn(count, (0, 1), 0)
    return [reader.cut(question, MERGED, SEGMENT) for question in questions]


def test_answers_are_those_of_each_example_alone_in_order_and_without_dropout(small, monkeypatch):
    """Batches are of LANES. Lanes of different lengths do not see each other's padding."""
    monkeypatch.setattr(reader, "LANES", 6)
    monkeypatch.setitem(SIZES, "hidden_dropout_prob", 0.5)
    model = questions.small_model(reader.FIRST + MERGED.vocabulary, True, 3)
    model.kind.bias.data[0] = 9.0  # a span
    batch = small_examples(12)
    answers = list(reader.answers(model.train(), batch))
    assert not model.training, "answers were given with dropout"
    assert len({len(example.tokens) for example in batch}) > 1
    assert len(set(answers)) > 2

    spans, kinds = (logits.detach() for logits in model.read(reader.batched(batch)))
    for lane, example in enumerate(batch):
        own_spans, own_kinds = (x.detach()[0] for x in model.read(reader.batched([example])))
        torch.testing.assert_close(spans[lane, :, : example.text.size], own_spans)
        torch.testing.assert_close(kinds[lane], own_kinds)
        assert answers[lane] == reader.answer_text(example, own_spans.numpy(), own_kinds.numpy())


class Noted(torch.nn.Module):
    """Notes what it is to learn; an update's loss is of its one parameter, or of the other."""

    def __init__(self):
        super().__init__()
        self.kind = torch.nn.Linear(3, 2)
        self.learned = []  # (numbers, answers) of each update

    def answer_loss(self, numbers, kind, places):
        assert self.training
        self.learned.append((numbers, torch.column_stack([kind, places]).tolist()))
        update = len(self.learned)
        return loss_of(update, [self.kind.weight, self.kind.bias])


def loss_of(update, parameters):
    """Its gradient is larger than 1 from the fifth update on."""
    return update * parameters[update % 2].sum() / 10


def fine_tuned(seed, monkeypatch):
    """A Noted that began at 0 and learned from six examples, and its numbers in their order."""
    some = [example._replace(ends=number) for number, example in enumerate(small_examples(6))]
    monkeypatch.setattr(reader, "batched", lambda batch, _: [example.ends for example in batch])
    model = Noted().eval()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    reader.fine_tune(model, some, 50, 4, 3.0, seed, "")
    for numbers, answers in model.learned:
        assert answers == [[*some[number].answer] for number in numbers]
    return model, [number for numbers, _ in model.learned for number in numbers]


def test_every_pass_reads_all_examples_once_in_an_order_of_its_own(monkeypatch):
    """The seed draws the order; what is learned of an example is its own answer."""
    first, again, other = (fine_tuned(seed, monkeypatch)[1] for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(first[:6]) == sorted(first[6:12]) == [*range(6)]
    assert first[:6] != first[6:12]


def test_updates_are_adams_of_their_own_loss_at_a_rate_that_rises_and_falls(monkeypatch):
    """In training mode, with large gradients clipped; nothing is left of the gradient before."""
    model, _ = fine_tuned(0, monkeypatch)
    expected = [torch.nn.Parameter(torch.zeros_like(own)) for own in model.parameters()]
    adam = torch.optim.Adam(expected, betas=(0.9, 0.98), eps=1e-6)
    rates = [1, 2, 3, *(3 * left / 48 for left in range(47, 0, -1))]
    for update, rate in enumerate(rates, 1):
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        loss_of(update, expected).backward()
        torch.nn.utils.clip_grad_norm_(expected, 1.0)
        adam.step()
    torch.testing.assert_close([*model.parameters()], expected, msg="the rate or Adam: fine_tune")


def test_a_row_is_trained_on_all_stages_and_scored_by_its_answers(small, monkeypatch):
    task = questions.make_task()
    taught = task.stages[-1][0]
    assert task.asked[0].question != taught[0].question, "what is asked is taught: make_task"
    fine_tune = Mock()
    right = [example.question.answer for example in task.asked]
    given_ = [f"The {answer}." for answer in right[:5]] + [f"line {answer}" for answer in right[5:]]
    monkeypatch.setattr(reader, "fine_tune", fine_tune)
    monkeypatch.setattr(reader, "answers", lambda model, asked: given_)
    run = questions.scored(lambda: task, "recurrent", 3)
    (model, *first, _), (same, *second, _) = (call.args for call in fine_tune.call_args_list)
    assert model is same and model.recurrent
    assert [first, second] == [[*stage, 32, 0.002, 3] for stage in task.stages]
    half_right = sum(answer not in ("yes", "no") for answer in right[5:])  # one word of two is
    assert half_right > 0
    assert run == {"F1": pytest.approx(50 + half_right * 10 * 2 / 3), "exact match": 50}
