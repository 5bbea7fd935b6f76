"""Table 3 of Adding Recurrence: questions of two hops, their reader, and the command."""

import dataclasses
import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.tokenizers import tokenizer_of_ranks
from accelerated.lab.systems import questions, reader, two_hops
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.systems.two_hops import Question, f1, normalised
from reference.roberta import Config

MERGED = [b"th", b"the", b" the", b" ca", b" caf", "é".encode()]
TOKENS = [*(bytes([byte]) for byte in range(256)), *MERGED]
BPE = tokenizer_of_ranks("bpe", {token: rank for rank, token in enumerate(TOKENS)})
SIZES = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "feed_forward": 32,
    "segment": 10,
    "module_width": 16,
    "dropout": 0.0,
}
CONFIG = Config(vocabulary=4 + len(TOKENS), **SIZES)
TEXTS = st.text(st.sampled_from("the café.\n"), min_size=1, max_size=60)
LINES = [f"Line number {number} says little." for number in range(9)]


@given(st.integers(0, 2**31))
def test_answers_follow_from_the_two_paragraphs(seed):
    [question] = two_hops.drawn(1, LINES, seed)
    assert two_hops.drawn(1, LINES, seed) == [question]
    lines = question.text.splitlines()
    titles = lines[::2]
    sentences = lines[1::2]
    paragraphs = dict(zip(titles, sentences, strict=True))
    name = paragraphs["Name"]
    file = paragraphs["File"]
    assert titles.index("Name") < titles.index("File")
    assert {*sentences} - {name, file} <= {f" {line}" for line in LINES}

    thing, holder = name.removesuffix(".").split()
    places = dict(fact.split() for fact in file.removesuffix(",").split(","))
    assert places.keys() == two_hops.PLACES.keys()
    assert all(place in two_hops.PLACES[own] for own, place in places.items())
    hops = [question.text[start:end] for start, end in question.hops]
    assert hops == [name, f" {holder} {places[holder]},"]

    asked, *guess = question.question.removesuffix("?").split()
    assert asked == thing
    if guess:
        assert guess[0] in places.values()
        assert question.answer == ("yes" if guess[0] == places[holder] else "no")
    else:
        assert question.answer == places[holder]


def test_the_places_alone_say_nothing_of_the_answer():
    """No two holders share a place; every holder is as likely to be asked for."""
    every = list(itertools.chain(*two_hops.PLACES.values()))
    assert len(set(every)) == len(every)
    assert not {*every, *two_hops.PLACES} & {*two_hops.THINGS}

    drawn = two_hops.drawn(4000, LINES, 0)
    spans = [question for question in drawn if question.answer not in ("yes", "no")]
    before = [q.text[: q.hops[1][0]].rpartition("File\n")[2] for q in spans]  # the fact asked for
    asked = Counter(facts.count(",") for facts in before)
    assert set(asked) == {0, 1, 2, 3}
    assert min(asked.values()) > 0.22 * len(spans)
    counts = Counter(question.answer for question in drawn)
    assert 0.1 < counts["yes"] / 4000 < 0.15
    assert 0.1 < counts["no"] / 4000 < 0.15


def test_no_line_of_the_others_is_for_training():
    train, others = two_hops.prose()
    assert len(train) >= 20
    assert len(others) >= 20
    assert not set(train) & set(others)
    words = " ".join(train + others).lower().split()
    words = {word.strip(".,'") for word in words}
    assert not words & {*two_hops.PLACES, *itertools.chain(*two_hops.PLACES.values())}


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
    example = reader.cut(Question(asked, text, "yes", ((0, len(text)),)), BPE, segment)
    prefix = [reader.CLS, *(BPE.encode(asked)[: segment // 2 - 2] + reader.FIRST), reader.SEP]
    ids = (BPE.encode(text) + reader.FIRST).tolist()
    room = segment - len(prefix) - 1
    assert room >= segment / 2 - 1
    assert example.ends[-1] == len(text.encode())
    pieces = [ids[at : at + room] for at in range(0, len(ids), room)]
    for piece, window in zip(pieces, reader.batched([example]), strict=True):
        expected = [*prefix, *piece, reader.SEP]
        padding = segment - len(expected)
        assert window.tokens[0].tolist() == expected + [reader.PAD] * padding
        assert window.tokens[window.text].tolist() == piece
        assert window.readable[0].tolist() == [True] * len(expected) + [False] * padding


@given(text=TEXTS, data=st.data(), segment=st.integers(6, 20))
def test_an_answers_tokens_are_the_fewest_that_spell_it(text, data, segment):
    begin = data.draw(st.integers(0, len(text) - 1))
    answer = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    example = reader.cut(Question("the", text, answer, ((0, len(text)),)), BPE, segment)
    kind, first, last = example.answer
    assert kind == 0

    edges = [0, *example.ends.tolist()]  # of the tokens among the text's bytes
    begin = len(text[: text.index(answer)].encode())
    end = begin + len(answer.encode())
    start, stop = np.searchsorted(np.flatnonzero(example.text), [first, last + 1])
    assert edges[start] <= begin < edges[start + 1]
    assert edges[stop - 1] < end <= edges[stop]
    if stop - start <= reader.LONGEST:
        spans = np.zeros((2, example.text.size))
        spans[0, first] = 9
        spans[1, last] = 9
        spelled = text.encode()[edges[start] : edges[stop]].decode(errors="ignore").strip()
        assert reader.answer_text(example, spans, np.array([1.0, 0, 0])) == spelled


def test_yes_and_no_are_kinds_and_a_span_stands_in_the_last_supporting_sentence():
    """Though the text has these words, and the answer elsewhere too."""
    question = Question("x", " yes, no, a cat, a dog, a cat. no cat", "cat", ((16, 23), (23, 30)))
    at = len(["<CLS>", "x", "<SEP>"]) + question.text.index("cat.")  # each letter is a token
    assert reader.cut(question, BPE, 60).answer == (0, at, at + 2)
    for number, answer in enumerate(("yes", "no"), 1):
        example = reader.cut(question._replace(answer=answer), BPE, 40)
        assert example.answer == (number, 0, 0)
        nowhere = np.zeros((2, example.text.size))
        assert reader.answer_text(example, nowhere, np.eye(3)[number]) == answer


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_the_best_span_is_the_best_of_all(length, longest, seed):
    start, end = np.random.default_rng(seed).normal(size=(2, length))
    sums = {}
    for first in range(length):
        for last in range(first, min(length, first + longest)):
            sums[first, last] = start[first] + end[last]
    assert reader.best_span(start, end, longest) == max(sums, key=sums.get)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_the_distance_is_of_the_windows_in_which_supporting_sentences_end(ends):
    """Each x is a token; a window of 10 has 6 of the text."""
    question = Question("x", "x" * 60, "x", tuple((end - 1, end) for end in ends))
    distance = (max(ends) - 1) // 6 - (min(ends) - 1) // 6
    assert reader.cut(question, BPE, 10).distance == distance


def small_examples(count):
    """Examples of questions on short texts."""
    questions = two_hops.drawn(count, ["A line."], 0, (0, 1))
    return [reader.cut(question, BPE, CONFIG.segment) for question in questions]


def test_answers_are_those_of_each_example_alone_in_order_and_without_dropout(monkeypatch):
    """Lanes of different lengths do not see each other's padding.

    Batches are of LANES, of which the last is full here.
    """
    monkeypatch.setattr(reader, "LANES", 6)
    model = Roberta(dataclasses.replace(CONFIG, dropout=0.5), 3)
    batch = small_examples(12)
    model.answer.kind_bias.data[0] = 9.0  # a span
    answers = list(reader.answers(model.train(), batch))
    assert not model.training
    assert len({len(example.tokens) for example in batch}) > 1
    assert len(set(answers)) > 2

    spans, kinds = (logits.detach() for logits in model.read(reader.batched(batch)))
    for lane, example in enumerate(batch):
        alone = [logits.detach()[0] for logits in model.read(reader.batched([example]))]
        together = [spans[lane, :, : example.text.size], kinds[lane]]
        torch.testing.assert_close(together, alone)
        own_spans, own_kinds = alone
        assert answers[lane] == reader.answer_text(example, own_spans.numpy(), own_kinds.numpy())


@pytest.fixture
def untrained(monkeypatch):
    """A model whose losses are what they are given; training returns them."""

    def train(model, loss_of, updates, *how):
        return [loss_of(update) for update in range(1, updates + 1)]

    def returned(*given):
        return given

    monkeypatch.setattr(reader, "train", train)
    losses = {"masked_loss": returned, "answer_loss": returned}
    return SimpleNamespace(config=CONFIG, embedding=torch.zeros(1), **losses)


def test_the_pretraining_reads_pieces_from_anywhere_and_asks_for_masked_tokens(untrained):
    """Each between [CLS] and [SEP]; only what is asked for is read as something else."""
    updates = reader.pretrain(untrained, np.arange(200), 10, 400, 0.1)
    shapes = {part.shape for part in itertools.chain(*updates)}
    assert shapes == {(400, CONFIG.segment)}
    read, targets, scored = map(torch.cat, zip(*updates, strict=True))
    assert (targets[:, 0] == reader.CLS).all()
    assert (targets[:, -1] == reader.SEP).all()
    assert (targets[:, 1:-1].diff() == 1).all()
    assert {*(targets[:, 1] - reader.FIRST).tolist()} >= {*range(190)}

    assert (read == targets)[~scored].all()
    assert not scored[:, [0, -1]].any()
    assert 0.12 < scored[:, 1:-1].double().mean() < 0.18
    hidden = (read == reader.FIRST + len(TOKENS))[scored].double().mean()
    same = (read == targets)[scored].double().mean()
    assert 0.72 < hidden < 0.88
    assert 0.04 < same < 0.17
    assert 0.04 < 1 - hidden - same < 0.17


def test_every_pass_reads_all_examples_once_in_an_order_of_its_own(untrained, monkeypatch):
    """The seed draws the order; what is learned of an example is its own answer."""
    some = [example._replace(distance=number) for number, example in enumerate(small_examples(6))]
    monkeypatch.setattr(reader, "batched", lambda batch, _: [example.distance for example in batch])

    def updates(seed):
        return reader.fine_tune(untrained, some, 3, 4, 0.01, seed, "")

    def order(seed):
        return list(itertools.chain(*(numbers for numbers, _, _ in updates(seed))))

    first = order(0)
    assert first == order(0) != order(1)
    assert sorted(first[:6]) == sorted(first[6:]) == [*range(6)]
    assert first[:6] != first[6:]
    for numbers, kind, places in updates(0):
        answers = torch.column_stack([kind, places]).tolist()
        assert answers == [[*some[number].answer] for number in numbers]


def test_updates_are_adams_of_their_own_loss_at_a_rate_that_rises_and_falls(monkeypatch):
    """In training mode, with the gradient clipped; nothing is left of the gradient before."""
    model = Roberta(CONFIG).eval()
    own = ["embedding", "positions"] * 25  # the parameter that an update's loss is of
    rates = []

    def step(adam):
        assert model.training
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(grads.values()).item()
        assert norm == pytest.approx(1, rel=1e-4)
        assert [name for name, grad in grads.items() if grad.any()] == [own[len(rates)]]
        [group] = adam.param_groups
        assert group["betas"] == (0.9, 0.98)
        rates.append(group["lr"])

    def loss_of(update):
        return 9 * model.get_parameter(own[update - 1]).sum()

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    values = reader.train(model, loss_of, 50, 3.0, "")
    assert len(values) == 50
    assert values[0] == pytest.approx(9 * model.embedding.sum().item(), rel=1e-6)
    assert rates[:3] == pytest.approx([1, 2, 3])
    assert rates[-1] == pytest.approx(3 / 48)
    assert np.diff(rates)[3:] == pytest.approx(np.full(46, -3 / 48))


@pytest.fixture
def small(monkeypatch):
    """The task of small texts and models."""
    changed = {
        "pretraining": [2, 2, 0.01],
        "updates": [1, 2],
        "questions": [20, 10],
        "windows": [9, 12],
    }
    text = SimpleNamespace(tokens=np.arange(999, dtype=np.uint16) % 256)
    corpus = SimpleNamespace(splits={"train": text})
    monkeypatch.setattr(questions, "SIZES", SIZES | {"segment": 24})
    monkeypatch.setattr(questions, "SMALL", questions.SMALL | changed)
    monkeypatch.setattr(questions, "train_bpe", lambda source, vocabulary: BPE)
    monkeypatch.setattr(questions, "tokenised", lambda *source: corpus)
    monkeypatch.setattr(two_hops, "prose", lambda: (["A line.", "Two."], ["Three."]))
    yield questions.task.cache_clear()
    questions.task.cache_clear()


def test_both_rows_begin_with_the_same_pretrained_weights(small):
    """The seed draws the recurrence's weights alone."""
    fresh = questions.small_model(CONFIG.vocabulary, False, 0).state_dict()
    model = questions.task().model
    weights = model(False, 0).state_dict()
    assert any(not torch.equal(value, fresh[name]) for name, value in weights.items())
    recurrent = model(True, 5).state_dict()
    same = model(True, 5).state_dict()
    other = model(True, 6).state_dict()
    for name, value in weights.items():
        assert torch.equal(value, recurrent[name])
        assert torch.equal(value, other[name])
    drawn = "module.inserted"
    assert torch.equal(recurrent[drawn], same[drawn])
    assert not torch.equal(recurrent[drawn], other[drawn])


def test_the_task_has_short_texts_then_longer_ones_and_asks_about_unseen_lines(small):
    task = questions.task()
    (short, first), (long, second) = task.stages
    assert (first, second) == (1, 2)
    assert (len(short), len(long), len(task.asked)) == (20, 20, 10)
    assert {example.question.text.count("\n") for example in short} == {4, 6}
    assert {len(example.tokens) for example in long} == {9, 10, 11, 12}, "windows"
    assert "Three" not in "".join(example.question.text for example in short + long)
    for example in task.asked:
        text = example.question.text
        assert text.count("Test\n Three.\n") == text.count("Test") > 0


def test_a_row_is_trained_on_all_stages_and_scored_by_its_answers(small, monkeypatch):
    """A run says of each answer its distance, whether it is a span, and whether it is right."""
    task = questions.task()
    fine_tune = reader.fine_tune
    stages = []

    def noted(model, *how):
        assert model.config.recurrent
        stages.append(list(how[:5]))
        return fine_tune(model, *how)

    right = [example.question.answer for example in task.asked]
    given_ = [f"The {answer}." for answer in right[:5]] + [f"line {answer}" for answer in right[5:]]
    monkeypatch.setattr(reader, "fine_tune", noted)
    monkeypatch.setattr(reader, "answers", lambda model, asked: given_)
    run = questions.run("recurrent", 3)
    assert stages == [[examples, updates, 32, 0.002, 3] for examples, updates in task.stages]

    distances = [example.distance for example in task.asked]
    spans = [answer not in ("yes", "no") for answer in right]
    is_right = [1] * 5 + [0] * 5
    assert run["answers"] == [list(row) for row in zip(distances, spans, is_right, strict=True)]
    assert run["exact match"] == 50
    assert sum(spans[5:]) > 0
    assert run["f1"] == pytest.approx(50 + sum(spans[5:]) * 10 * 2 / 3)
