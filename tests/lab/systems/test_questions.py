"""Table 3 of Adding Recurrence: questions of two hops, the reader that answers them over windows, and the command."""

import dataclasses
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

TOKENS = [bytes([byte]) for byte in range(256)] + [
    b"th",
    b"the",
    b" the",
    b" ca",
    b" caf",
    "é".encode(),
]
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
CONFIG = Roberta.Config(vocabulary=4 + len(TOKENS), **SIZES)
TEXTS = st.text(st.sampled_from("the café.\n"), min_size=1, max_size=60)
LINES = [f"Line number {number} says little." for number in range(9)]


@given(st.integers(0, 2**31))
def test_answers_follow_from_the_two_paragraphs(seed):
    [question] = two_hops.drawn(1, LINES, seed)
    assert two_hops.drawn(1, LINES, seed) == [question]
    lines = question.text.splitlines()
    titles, sentences = lines[::2], lines[1::2]
    paragraphs = dict(zip(titles, sentences, strict=True))
    thing, holder = paragraphs["Name"].removesuffix(".").split()
    places = dict(sentence.split() for sentence in paragraphs["File"].removesuffix(",").split(","))
    assert places.keys() == two_hops.PLACES.keys() and all(
        places[own] in two_hops.PLACES[own] for own in places
    )
    asked, *guess = question.question.removesuffix("?").split()
    assert asked == thing and len(guess) == (question.answer in ("yes", "no"))
    if guess:
        assert (guess[0] == places[holder]) == (question.answer == "yes") and guess[
            0
        ] in places.values()
    else:
        assert question.answer == places[holder]
    assert [question.text[slice(*hop)] for hop in question.hops] == [
        paragraphs["Name"],
        f" {holder} {places[holder]},",
    ]
    assert titles.index("Name") < titles.index("File")
    assert {*sentences} - {paragraphs["Name"], paragraphs["File"]} <= {f" {line}" for line in LINES}


def test_the_places_alone_say_nothing_of_the_answer():
    """No two holders share a place; every holder is as likely to be asked for."""
    every = [place for own in two_hops.PLACES.values() for place in own]
    assert len(set(every)) == len(every) and not {*every, *two_hops.PLACES} & {*two_hops.THINGS}
    drawn = two_hops.drawn(4000, LINES, 0)
    spans = [question for question in drawn if question.answer not in ("yes", "no")]
    asked = Counter(q.text[: q.hops[1][0]].rpartition("File\n")[2].count(",") for q in spans)
    assert set(asked) == {0, 1, 2, 3} and min(asked.values()) > 0.22 * len(spans)
    counts = Counter(question.answer for question in drawn)
    assert 0.1 < counts["yes"] / 4000 < 0.15 and 0.1 < counts["no"] / 4000 < 0.15


def test_no_line_of_the_others_is_for_training():
    train, others = two_hops.prose()
    assert len(train) >= 20 and len(others) >= 20 and not set(train) & set(others)
    words = {word.strip(".,'").lower() for line in train + others for word in line.split()}
    assert not words & {
        *two_hops.PLACES,
        *(place for places in two_hops.PLACES.values() for place in places),
    }


def test_answers_are_compared_as_hotpotqa_does():
    assert normalised(" The  Quick-brown an apple, A. ") == "quickbrown apple"
    assert normalised("7 a.m.") == "7 am", "punctuation goes first"
    assert f1("a b b c", "b b b d") == pytest.approx(2 * (2 / 3) * 0.5 / (2 / 3 + 0.5)), (
        "precision 2/3, recall 1/2"
    )
    assert (
        f1("yes", "yes, indeed")
        == f1("noanswer", "an answer")
        == f1("no", "yes")
        == f1("", "the")
        == 0
    )
    assert f1("Yes.", "yes") == 1 and f1("yes sir", "yes mam") == 0.5, "only a whole answer is yes"


@given(text=TEXTS, asked=TEXTS, segment=st.integers(6, 20))
def test_windows_hold_the_question_and_the_whole_text(text, asked, segment):
    example = reader.cut(Question(asked, text, "yes", ((0, len(text)),)), BPE, segment)
    prefix = [reader.CLS, *(BPE.encode(asked)[: segment // 2 - 2] + reader.FIRST), reader.SEP]
    ids, room = (BPE.encode(text) + reader.FIRST).tolist(), segment - len(prefix) - 1
    pieces = [ids[at : at + room] for at in range(0, len(ids), room)]
    for piece, (tokens, readable, of_text) in zip(pieces, reader.batched([example]), strict=True):
        expected = [*prefix, *piece, reader.SEP]
        padding = segment - len(expected)
        assert (
            tokens[0].tolist() == expected + [reader.PAD] * padding
            and tokens[of_text].tolist() == piece
        )
        assert readable[0].tolist() == [True] * len(expected) + [False] * padding
    assert room >= segment / 2 - 1 and example.ends[-1] == len(text.encode())


@given(text=TEXTS, data=st.data(), segment=st.integers(6, 20))
def test_an_answers_tokens_are_the_fewest_that_spell_it(text, data, segment):
    begin = data.draw(st.integers(0, len(text) - 1))
    answer = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    example = reader.cut(Question("the", text, answer, ((0, len(text)),)), BPE, segment)
    kind, first, last = example.answer
    own = slice(*np.searchsorted(np.flatnonzero(example.text), [first, last + 1]))
    edges = [0, *example.ends.tolist()]  # of the tokens among the text's bytes
    begin = len(text[: text.index(answer)].encode())
    end = begin + len(answer.encode())
    assert (
        kind == 0
        and edges[own.start] <= begin < edges[own.start + 1]
        and edges[own.stop - 1] < end <= edges[own.stop]
    )
    spans = np.zeros((2, example.text.size))
    spans[0, first] = spans[1, last] = 9
    if own.stop - own.start <= reader.LONGEST:
        spelled = text.encode()[edges[own.start] : edges[own.stop]]
        assert (
            reader.answer_text(example, spans, np.array([1.0, 0, 0]))
            == spelled.decode(errors="ignore").strip()
        )


def test_yes_and_no_are_kinds_and_a_span_stands_in_the_last_supporting_sentence():
    """Though the text has these words, and the answer elsewhere too."""
    question = Question("x", " yes, no, a cat, a dog, a cat. no cat", "cat", ((16, 23), (23, 30)))
    at = len(["<CLS>", "x", "<SEP>"]) + question.text.index("cat.")  # each letter is a token
    assert reader.cut(question, BPE, 60).answer == (0, at, at + 2)
    for number, answer in enumerate(("yes", "no"), 1):
        example = reader.cut(question._replace(answer=answer), BPE, 40)
        assert example.answer == (number, 0, 0)
        assert (
            reader.answer_text(example, np.zeros((2, example.text.size)), np.eye(3)[number])
            == answer
        )


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_the_best_span_is_the_best_of_all(length, longest, seed):
    start, end = np.random.default_rng(seed).normal(size=(2, length))
    pairs = [
        (first, last)
        for first in range(length)
        for last in range(first, min(length, first + longest))
    ]
    assert reader.best_span(start, end, longest) == max(
        pairs, key=lambda pair: start[pair[0]] + end[pair[1]]
    )


@given(st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_the_distance_is_of_the_windows_in_which_supporting_sentences_end(ends):
    """Each x is a token; a window of 10 has 6 of the text."""
    question = Question("x", "x" * 60, "x", tuple((end - 1, end) for end in ends))
    assert reader.cut(question, BPE, 10).distance == (max(ends) - 1) // 6 - (min(ends) - 1) // 6


def small_examples(count):
    return [
        reader.cut(question, BPE, CONFIG.segment)
        for question in two_hops.drawn(count, ["A line."], 0, (0, 1))
    ]


def test_answers_are_those_of_each_example_alone_in_order_and_without_dropout(monkeypatch):
    """Lanes of different lengths do not see each other's padding. Batches are of LANES, of which the last is full here."""
    monkeypatch.setattr(reader, "LANES", 6)
    model, batch = Roberta(dataclasses.replace(CONFIG, dropout=0.5), 3), small_examples(12)
    model.answer.kind_bias.data[0] = 9.0  # a span
    answers = list(reader.answers(model.train(), batch))
    assert (
        len({len(example.tokens) for example in batch}) > 1
        and len(set(answers)) > 2
        and not model.training
    )
    spans, kinds = (logits.detach() for logits in model.read(reader.batched(batch)))
    for lane, example in enumerate(batch):
        alone = [logits.detach()[0] for logits in model.read(reader.batched([example]))]
        torch.testing.assert_close([spans[lane, :, : example.text.size], kinds[lane]], alone)
        assert answers[lane] == reader.answer_text(example, *(logits.numpy() for logits in alone))


@pytest.fixture
def untrained(monkeypatch):
    """A model whose losses are what they are given; training returns them."""
    monkeypatch.setattr(
        reader,
        "train",
        lambda model, loss_of, updates, *how: [*map(loss_of, range(1, updates + 1))],
    )
    return SimpleNamespace(
        config=CONFIG, masked_loss=lambda *given: given, answer_loss=lambda *given: given
    )


def test_the_pretraining_reads_pieces_from_anywhere_and_asks_for_masked_tokens(untrained):
    """Each between [CLS] and [SEP]; only what is asked for is read as something else."""
    updates = reader.pretrain(untrained, np.arange(200), 10, 400, 0.1)
    assert {part.shape for update in updates for part in update} == {(400, CONFIG.segment)}
    read, targets, scored = map(torch.cat, zip(*updates, strict=True))
    assert (targets[:, 0] == reader.CLS).all() and (targets[:, -1] == reader.SEP).all()
    assert (targets[:, 1:-1].diff() == 1).all()
    assert {*(targets[:, 1] - reader.FIRST).tolist()} >= {*range(190)}
    assert (read == targets)[~scored].all() and not scored[:, [0, -1]].any()
    assert 0.12 < scored[:, 1:-1].double().mean() < 0.18
    hidden, same = (
        (read == other)[scored].double().mean() for other in (reader.FIRST + len(TOKENS), targets)
    )
    assert 0.72 < hidden < 0.88 and 0.04 < same < 0.17 and 0.04 < 1 - hidden - same < 0.17


def test_every_pass_reads_all_examples_once_in_an_order_of_its_own(untrained, monkeypatch):
    """The seed draws the order; what is learned of an example is its own answer."""
    some = [example._replace(distance=number) for number, example in enumerate(small_examples(6))]
    monkeypatch.setattr(reader, "batched", lambda batch: [example.distance for example in batch])
    first, same, other = (
        reader.fine_tune(untrained, some, 3, 4, 0.01, seed, "") for seed in (0, 0, 1)
    )
    order, again, another = (
        [number for numbers, *_ in updates for number in numbers]
        for updates in (first, same, other)
    )
    assert (
        order == again != another
        and order[:6] != order[6:]
        and sorted(order[:6]) == sorted(order[6:]) == [*range(6)]
    )
    for numbers, kind, places in first:
        assert torch.column_stack([kind, places]).tolist() == [
            [*some[number].answer] for number in numbers
        ]


def test_updates_are_adams_of_their_own_loss_at_a_rate_that_rises_and_falls(monkeypatch):
    """In training mode, with the gradient clipped; nothing is left of the gradient before."""
    model, rates, own = Roberta(CONFIG).eval(), [], ["embedding", "positions"] * 25

    def step(adam):
        grads = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        norm = torch.nn.utils.get_total_norm(grads.values()).item()
        assert [name for name, grad in grads.items() if grad.any()] == [own[len(rates)]]
        assert (
            model.training
            and norm == pytest.approx(1, rel=1e-4)
            and adam.param_groups[0]["betas"] == (0.9, 0.98)
        )
        rates.append(adam.param_groups[0]["lr"])

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    values = reader.train(
        model, lambda update: 9 * model.get_parameter(own[update - 1]).sum(), 50, 3.0, ""
    )
    assert len(values) == 50 and values[0] == pytest.approx(
        9 * model.embedding.sum().item(), rel=1e-6
    )
    assert rates[:3] == pytest.approx([1, 2, 3]) and rates[-1] == pytest.approx(3 / 48)
    assert np.diff(rates)[3:] == pytest.approx(np.full(46, -3 / 48))


@pytest.fixture
def small(monkeypatch):
    """The task of small texts and models."""
    monkeypatch.setattr(questions, "SIZES", SIZES | {"segment": 24})
    changed = {
        "pretraining": [2, 2, 0.01],
        "updates": [1, 2],
        "questions": [20, 10],
        "windows": [9, 12],
    }
    monkeypatch.setattr(questions, "SMALL", questions.SMALL | changed)
    monkeypatch.setattr(questions, "train_bpe", lambda source, vocabulary: BPE)
    text = SimpleNamespace(tokens=np.arange(999, dtype=np.uint16) % 256)
    monkeypatch.setattr(
        questions, "tokenised", lambda *source: SimpleNamespace(splits={"train": text})
    )
    monkeypatch.setattr(two_hops, "prose", lambda: (["A line.", "Two."], ["Three."]))
    yield questions.task.cache_clear()
    questions.task.cache_clear()


def test_both_rows_begin_with_the_same_pretrained_weights(small):
    """The seed draws the recurrence's weights alone."""
    fresh = questions.small_model(CONFIG.vocabulary, False, 0)
    model = questions.task().model
    weights, recurrent, same, other = (
        model(*which).state_dict() for which in ((False, 0), (True, 5), (True, 5), (True, 6))
    )
    assert any(not torch.equal(value, fresh.state_dict()[name]) for name, value in weights.items())
    assert all(
        torch.equal(value, recurrent[name]) and torch.equal(value, other[name])
        for name, value in weights.items()
    )
    drawn = [own["module.inserted"] for own in (recurrent, same, other)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_row_is_trained_on_short_texts_then_longer_ones_and_answers_of_unseen_lines(
    small, monkeypatch
):
    """A run says of each answer its distance, whether it is a span, and whether it is right."""
    task, stages, fine_tune = questions.task(), [], reader.fine_tune
    (short, first), (long, second) = task.stages
    assert (first, second, len(short), len(long), len(task.asked)) == (1, 2, 20, 20, 10)
    assert all(example.question.text.count("\n") in (4, 6) for example in short)
    assert {len(example.tokens) for example in long} == {9, 10, 11, 12}, "windows"
    assert all(
        e.question.text.count("Test\n Three.\n") == e.question.text.count("Test") > 0
        for e in task.asked
    )
    assert "Three" not in "".join(example.question.text for example in short + long)
    monkeypatch.setattr(reader, "fine_tune", lambda *how: stages.append(how[:6]) or fine_tune(*how))
    right = [example.question.answer for example in task.asked]
    given = [f"The {answer}." for answer in right[:5]] + [f"line {answer}" for answer in right[5:]]
    monkeypatch.setattr(reader, "answers", lambda model, asked: given)
    run = questions.run("recurrent", 3)
    assert [how for _, *how in stages] == [
        [examples, updates, 32, 0.002, 3] for examples, updates in task.stages
    ]
    assert all(model.config.recurrent for model, *_ in stages)
    spans = [answer not in ("yes", "no") for answer in right]
    assert run["answers"] == [
        [e.distance, span, n < 5] for n, (e, span) in enumerate(zip(task.asked, spans, strict=True))
    ]
    assert run["exact match"] == 50 < run["f1"] and run["f1"] == pytest.approx(
        50 + sum(spans[5:]) * 10 * 2 / 3
    )
