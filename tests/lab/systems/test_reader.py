"""Questions become windows that lose nothing, answers are found where they stand, and a reader is trained on all of them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.tokenizers import tokenizer_of_ranks
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.systems.two_hops import Question
from accelerated.program.errors import InputError
from tests.conftest import examples

TOKENS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b" ca", b" caf", "é".encode()]
BPE = tokenizer_of_ranks("bpe", {token: rank for rank, token in enumerate(TOKENS)})
SIZES = {"width": 16, "layers": 2, "heads": 2, "feed_forward": 32, "segment": 10, "module_width": 16, "dropout": 0.0}
CONFIG = Roberta.Config(vocabulary=4 + len(TOKENS), **SIZES)
TEXTS = st.text(st.sampled_from("the café.\n"), min_size=1, max_size=60)


@given(text=TEXTS, asked=TEXTS, segment=st.integers(6, 20))
def test_windows_hold_the_question_and_the_whole_text(text, asked, segment):
    example = reader.cut(Question(asked, text, "yes", ((0, len(text)),)), BPE, segment)
    prefix = [reader.CLS, *(BPE.encode(asked)[: segment // 2 - 2] + reader.FIRST), reader.SEP]
    ids, room = (BPE.encode(text) + reader.FIRST).tolist(), segment - len(prefix) - 1
    pieces = [ids[at : at + room] for at in range(0, len(ids), room)]
    for piece, (tokens, readable, of_text) in zip(pieces, reader.batched([example]), strict=True):
        expected = [*prefix, *piece, reader.SEP]
        padding = segment - len(expected)
        assert tokens[0].tolist() == expected + [reader.PAD] * padding and tokens[of_text].tolist() == piece
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
    assert kind == 0 and edges[own.start] <= begin < edges[own.start + 1] and edges[own.stop - 1] < end <= edges[own.stop]
    spans = np.zeros((2, example.text.size))
    spans[0, first] = spans[1, last] = 9
    if own.stop - own.start <= reader.LONGEST:
        spelled = text.encode()[edges[own.start] : edges[own.stop]]
        assert reader.answer_text(example, spans, np.array([1.0, 0, 0])) == spelled.decode(errors="ignore").strip()


def test_yes_and_no_are_kinds_and_a_span_stands_in_the_last_supporting_sentence():
    """Though the text has these words, and the answer elsewhere too."""
    question = Question("x", " yes, no, a cat, a dog, a cat. no cat", "cat", ((16, 23), (23, 30)))
    at = len(["<CLS>", "x", "<SEP>"]) + question.text.index("cat.")  # each letter is a token
    assert reader.cut(question, BPE, 60).answer == (0, at, at + 2)
    for number, answer in enumerate(("yes", "no"), 1):
        example = reader.cut(question._replace(answer=answer), BPE, 40)
        assert example.answer == (number, 0, 0)
        assert reader.answer_text(example, np.zeros((2, example.text.size)), np.eye(3)[number]) == answer


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_the_best_span_is_the_best_of_all(length, longest, seed):
    start, end = np.random.default_rng(seed).normal(size=(2, length))
    pairs = [(first, last) for first in range(length) for last in range(first, min(length, first + longest))]
    assert reader.best_span(start, end, longest) == max(pairs, key=lambda pair: start[pair[0]] + end[pair[1]])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_the_distance_is_of_the_windows_in_which_supporting_sentences_end(ends):
    """Each x is a token; a window of 10 has 6 of the text."""
    question = Question("x", "x" * 60, "x", tuple((end - 1, end) for end in ends))
    assert reader.cut(question, BPE, 10).distance == (max(ends) - 1) // 6 - (min(ends) - 1) // 6


def small_examples(count):
    return [reader.cut(question, BPE, CONFIG.segment) for question in two_hops.drawn(count, ["A line."], 0, (0, 1))]


def test_answers_are_those_of_each_example_alone_in_order_and_without_dropout(monkeypatch):
    """Lanes of different lengths do not see each other's padding. Batches are of LANES, of which the last is full here."""
    monkeypatch.setattr(reader, "LANES", 6)
    model, batch = Roberta(dataclasses.replace(CONFIG, dropout=0.5), 3), small_examples(12)
    model.answer.kind_bias.data[0] = 9.0  # a span
    answers = list(reader.answers(model.train(), batch))
    assert len({len(example.tokens) for example in batch}) > 1 and len(set(answers)) > 2 and not model.training
    spans, kinds = (logits.detach() for logits in model.read(reader.batched(batch)))
    for lane, example in enumerate(batch):
        alone = [logits.detach()[0] for logits in model.read(reader.batched([example]))]
        assert torch.allclose(spans[lane, :, : example.text.size], alone[0], atol=1e-5)
        assert torch.allclose(kinds[lane], alone[1], atol=1e-5) and spans[lane, :, example.text.size :].isneginf().all()
        assert answers[lane] == reader.answer_text(example, *(logits.numpy() for logits in alone))


@examples(10)
@given(st.integers(0, 2**31))
def test_what_is_masked(seed):
    tokens = np.random.default_rng(seed).integers(3, 260, size=(40, 50))
    tokens[:, 0], tokens[:, -1] = reader.CLS, reader.SEP
    read, scored = reader.masked(tokens, len(TOKENS), np.random.default_rng(seed))
    assert (read[~scored] == tokens[~scored]).all() and not scored[:, [0, -1]].any() and 0.12 < scored[:, 1:-1].mean() < 0.18
    hidden, same = (read == reader.FIRST + len(TOKENS))[scored].mean(), (read == tokens)[scored].mean()
    assert 0.72 < hidden < 0.88 and 0.04 < same < 0.17 and 0.04 < 1 - hidden - same < 0.17
    firsts = [reader.masked(tokens[:1, :4], len(TOKENS), np.random.default_rng(seed + more))[1][0, 1:3] for more in range(60)]
    assert all(scored.any() for scored in firsts), "at least one is asked for"
    assert any(not scored[0] for scored in firsts), "the first one no more often than needed"


@pytest.fixture
def untrained(monkeypatch):
    """A model whose losses are what they are given; training returns them."""
    monkeypatch.setattr(reader, "train", lambda model, loss_of, updates, *how: [*map(loss_of, range(1, updates + 1))])
    return SimpleNamespace(config=CONFIG, masked_loss=lambda *given: given, answer_loss=lambda *given: given)


def test_the_pretraining_reads_pieces_from_anywhere(untrained):
    """Each between [CLS] and [SEP]; only what is asked for is read as something else."""
    starts = set()
    for read, targets, scored in reader.pretrain(untrained, np.arange(200), 30, 5, 0.1):
        assert read.shape == targets.shape == scored.shape == (5, CONFIG.segment) and (read == targets)[~scored].all()
        assert (targets[:, 0] == reader.CLS).all() and (targets[:, -1] == reader.SEP).all()
        assert (targets[:, 1:-1].diff() == 1).all()
        starts |= {*(targets[:, 1] - reader.FIRST).tolist()}
    assert min(starts) < 20 and max(starts) > 170 and len(starts) > 80


def test_every_pass_reads_all_examples_once_in_an_order_of_its_own(untrained, monkeypatch):
    """The seed draws the order; what is learned of an example is its own answer."""
    some = [example._replace(distance=number) for number, example in enumerate(small_examples(6))]
    monkeypatch.setattr(reader, "batched", lambda batch: [example.distance for example in batch])
    first, same, other = (reader.fine_tune(untrained, some, 3, 4, 0.01, seed, "") for seed in (0, 0, 1))
    order, again, another = ([number for numbers, *_ in updates for number in numbers] for updates in (first, same, other))
    assert order == again != another and order[:6] != order[6:] and sorted(order[:6]) == sorted(order[6:]) == [*range(6)]
    for numbers, kind, places in first:
        assert torch.column_stack([kind, places]).tolist() == [[*some[number].answer] for number in numbers]


def test_updates_are_adams_of_their_own_loss_at_a_rate_that_rises_and_falls(monkeypatch):
    """In training mode, with the gradient clipped; nothing is left of the gradient before."""
    model, rates, own = Roberta(CONFIG).eval(), [], ["embedding", "positions"] * 25

    def step(adam):
        grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        norm = torch.nn.utils.get_total_norm(grads.values()).item()
        assert [name for name, grad in grads.items() if grad.any()] == [own[len(rates)]]
        assert model.training and norm == pytest.approx(1, rel=1e-4) and adam.param_groups[0]["betas"] == (0.9, 0.98)
        rates.append(adam.param_groups[0]["lr"])

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    values = reader.train(model, lambda update: 9 * model.get_parameter(own[update - 1]).sum(), 50, 3.0, "")
    assert len(values) == 50 and values[0] == pytest.approx(9 * model.embedding.sum().item(), rel=1e-6)
    assert rates[:3] == pytest.approx([1, 2, 3]) and rates[-1] == pytest.approx(3 / 48)
    assert np.diff(rates)[3:] == pytest.approx(np.full(46, -3 / 48))


def test_a_loss_that_is_not_finite_is_one_line():
    model = Roberta(CONFIG)
    with pytest.raises(InputError, match="loss is inf at step 1; what was saved before stays"):
        reader.train(model, lambda update: torch.inf * model.embedding.exp().sum(), 1, 0.1, "")
