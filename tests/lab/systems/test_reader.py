"""Questions become windows that lose nothing, answers are found where they stand, and a small reader learns."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.tokenizers import tokenizer_of_ranks
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.systems.two_hops import Question, text_of
from accelerated.program.errors import InputError
from tests.conftest import examples

TOKENS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b" ca", b" caf", "é".encode()]
BPE = tokenizer_of_ranks("bpe", {token: rank for rank, token in enumerate(TOKENS)})
MASK = reader.FIRST + len(TOKENS)
SIZES = {"width": 16, "layers": 2, "heads": 2, "feed_forward": 32, "segment": 10, "module_width": 16, "dropout": 0.0}
CONFIG = Roberta.Config(vocabulary=4 + len(TOKENS), **SIZES)
TEXTS = st.text(st.sampled_from("the café.\n"), min_size=1, max_size=60)


@given(text=TEXTS, asked=TEXTS, segment=st.integers(6, 20))
def test_windows_hold_the_question_and_the_whole_text(text, asked, segment):
    question = Question(asked, (("T", (text,)),), "yes", (("T", 0),))
    example = reader.cut(question, BPE, segment)
    prefix = [reader.CLS, *(BPE.encode(asked)[: segment // 2 - 2] + reader.FIRST), reader.SEP]
    read = []
    for tokens, readable, of_text in zip(example.tokens, example.readable, example.text, strict=True):
        length = readable.sum()
        assert readable[:length].all() and (tokens[~readable] == reader.PAD).all()
        assert tokens[: len(prefix)].tolist() == prefix and tokens[length - 1] == reader.SEP
        assert np.flatnonzero(of_text).tolist() == list(range(len(prefix), length - 1)) and len(tokens) == segment
        assert of_text.sum() >= 1 and len(tokens) - len(prefix) - 1 >= segment / 2 - 1
        read.extend(tokens[of_text])
    assert read == (BPE.encode(text_of(question)[0]) + reader.FIRST).tolist()
    assert example.readable[:-1].all() and example.spelled == text_of(question)[0].encode() and example.answer == (1, 0, 0)
    assert example.ends[-1] == len(example.spelled)


@given(text=TEXTS, data=st.data(), segment=st.integers(6, 20))
def test_an_answers_tokens_are_the_fewest_that_spell_it(text, data, segment):
    begin = data.draw(st.integers(0, len(text) - 1))
    answer = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    question = Question("the", (("T", (text,)),), answer, (("T", 0),))
    example = reader.cut(question, BPE, segment)
    kind, first, last = example.answer
    spans = np.zeros((2, example.text.size))
    spans[0, first] = spans[1, last] = 9
    chosen = np.flatnonzero(example.text)
    own = slice(*np.searchsorted(chosen, [first, last + 1]))
    pieces = [bytes(TOKENS[token - 3]) for token in example.tokens[example.text][own]]
    spelled = b"".join(pieces)
    assert kind == 0 and answer.encode() in spelled
    begin = 2 + len(text[: text.index(answer)].encode())  # behind the title
    end = begin + len(answer.encode())
    ends = [0, *example.ends.tolist()]
    assert ends[own.start] <= begin < ends[own.start + 1] and ends[own.stop - 1] < end <= ends[own.stop]
    if last - first < 2 and len(pieces) <= reader.LONGEST:
        assert reader.answer_text(example, spans, np.array([1.0, 0, 0])) == spelled.decode(errors="ignore").strip()


def test_yes_and_no_are_kinds_though_the_text_has_the_words():
    questions = [Question("the", (("T", ("yes, the no cat.",)),), answer, (("T", 0),)) for answer in ("yes", "no", "the")]
    examples = [reader.cut(question, BPE, 8) for question in questions]
    assert [example.answer for example in examples[:2]] == [(1, 0, 0), (2, 0, 0)] and examples[2].answer[0] == 0
    for kind, expected in ((1, "yes"), (2, "no")):
        assert reader.answer_text(examples[0], np.zeros((2, examples[0].text.size)), np.eye(3)[kind]) == expected


def test_an_answer_stands_in_the_last_supporting_sentence():
    question = Question("x", (("T", (" a cat,", " a dog,", " a cat.")),), "cat", (("T", 1), ("T", 2)))
    kind, first, last = reader.cut(question, BPE, 40).answer
    assert (kind, first - 3) == (0, text_of(question)[0].rindex("cat")) and last == first + 2, "each letter is a token here"


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_the_best_span_is_the_best_of_all(length, longest, seed):
    start, end = np.random.default_rng(seed).normal(size=(2, length))
    pairs = [(first, last) for first in range(length) for last in range(first, min(length, first + longest))]
    assert reader.best_span(start, end, longest) == max(pairs, key=lambda pair: start[pair[0]] + end[pair[1]])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_the_distance_is_of_the_windows_in_which_supporting_sentences_end(lengths, data):
    """Each x is a token; a window of 10 has 6 of the text, which begins with the title and a line's end."""
    facts = tuple(("T", data.draw(st.integers(0, len(lengths) - 1))) for _ in range(data.draw(st.integers(1, 3))))
    question = Question("x", (("T", tuple("x" * length for length in lengths)),), "x", facts)
    windows = [(2 + sum(lengths[: number + 1]) - 1) // 6 for _, number in facts]
    distance = reader.cut(question, BPE, 10).distance
    assert distance == max(windows) - min(windows)


def small_examples(count, seed=0):
    lines = ["A line."]
    return [reader.cut(question, BPE, CONFIG.segment) for question in two_hops.drawn(count, lines, seed, (0, 1))]


def test_a_batch_answers_as_each_example_alone():
    """Lanes of different lengths do not see each other's padding."""
    model, batch = Roberta(CONFIG, 3), small_examples(12)
    assert len({len(example.tokens) for example in batch}) > 1
    spans, kinds = model.eval().read(reader.batched(batch))
    for lane, example in enumerate(batch):
        alone = model.read(reader.batched([example]))
        assert torch.allclose(spans[lane, :, : example.text.size], alone[0][0], atol=1e-5)
        assert torch.allclose(kinds[lane], alone[1][0], atol=1e-5) and spans[lane, :, example.text.size :].isneginf().all()
    answers = list(reader.answers(model, batch))
    logits = [(spans[lane].detach().numpy(), kinds[lane].detach().numpy()) for lane in range(len(batch))]
    expected = [reader.answer_text(example, *pair) for example, pair in zip(batch, logits, strict=True)]
    assert answers == expected and not model.training


def test_answers_come_in_order_and_without_dropout(monkeypatch):
    """In batches of LANES, of which the last is full here."""
    monkeypatch.setattr(reader, "LANES", 4)
    model, some = Roberta(dataclasses.replace(CONFIG, dropout=0.5), 3), small_examples(8, seed=1)
    model.answer.kind_bias.data[0] = 9.0  # a span
    alone = [text for example in some for text in reader.answers(model.train(), [example])]
    assert list(reader.answers(model.train(), some)) == alone and len(set(alone)) > 2


@examples(10)
@given(st.integers(0, 2**31))
def test_what_is_masked(seed):
    tokens = np.random.default_rng(seed).integers(3, 260, size=(40, 50))
    tokens[:, 0], tokens[:, -1] = reader.CLS, reader.SEP
    read, scored = reader.masked(tokens, len(TOKENS), np.random.default_rng(seed))
    assert (read[~scored] == tokens[~scored]).all() and not scored[:, [0, -1]].any() and 0.12 < scored[:, 1:-1].mean() < 0.18
    hidden = (read == MASK)[scored].mean()
    same = (read == tokens)[scored].mean()
    assert 0.72 < hidden < 0.88 and 0.04 < same < 0.17 and 0.04 < 1 - hidden - same < 0.17
    one, asked = reader.masked(tokens[:1, :3], len(TOKENS), np.random.default_rng(seed))
    assert asked.sum() == 1 and one.shape == (1, 3), "at least one token is asked for"


def test_the_first_token_is_asked_for_no_more_often_than_others():
    tokens = np.full((2, 20), 9)
    asked = [reader.masked(tokens, len(TOKENS), np.random.default_rng(seed))[1][0, 1] for seed in range(60)]
    assert 0 < sum(asked) < 25


def test_the_pretraining_reads_pieces_from_anywhere(monkeypatch):
    """Each between [CLS] and [SEP]; what is asked for is read as <mask>, as another token or as it is."""
    seen, model = [], Roberta(CONFIG)
    monkeypatch.setattr(model, "masked_loss", lambda *given: seen.append(given) or model.embedding.sum())
    ranks = np.arange(200)
    reader.pretrain(model, ranks, 30, 5, 0.1)
    starts = set()
    for read, targets, scored in seen:
        assert read.shape == targets.shape == scored.shape == (5, CONFIG.segment) and (read == targets)[~scored].all()
        assert (targets[:, 0] == reader.CLS).all() and (targets[:, -1] == reader.SEP).all()
        assert (targets[:, 1:-1].diff() == 1).all()
        starts |= {*(targets[:, 1] - reader.FIRST).tolist()}
    assert min(starts) < 20 and max(starts) > 170 and len(starts) > 80


def test_a_reader_learns_and_a_seed_gives_the_same_losses():
    config = dataclasses.replace(CONFIG, segment=40)
    some = [reader.cut(question, BPE, 40) for question in two_hops.drawn(8, ["A line."], 0, (0, 0))]
    runs = [reader.fine_tune(Roberta(config, 0), some, 12, 4, 0.01, seed, "") for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2] and len(runs[0]) == 12
    assert np.mean(runs[0][-5:]) < 0.8 * np.mean(runs[0][:3])
    ranks = np.frombuffer(b"the cafe " * 99, np.uint8)
    losses = reader.pretrain(Roberta(CONFIG, 0), ranks, 12, 4, 0.01)
    assert np.mean(losses[-5:]) < 0.9 * losses[0]


def test_every_pass_reads_all_examples_once(monkeypatch):
    seen, some = [], small_examples(6)
    monkeypatch.setattr(reader, "batched", lambda batch: seen.extend(map(id, batch)) or [])
    model = Roberta(CONFIG)
    monkeypatch.setattr(model, "answer_loss", lambda windows, kind, places: model.embedding.sum())
    reader.fine_tune(model, some, 6, 4, 0.1, 0, "")
    for at in range(0, 24, 6):
        assert set(seen[at : at + 6]) == set(map(id, some))
    assert seen[:6] != seen[6:12]


def losses_of(model):
    """The same loss again and again."""
    while True:
        yield model.embedding.sum()


def test_the_rate_rises_and_falls(monkeypatch):
    rates, config = [], dataclasses.replace(CONFIG, vocabulary=5)
    model = Roberta(config)
    monkeypatch.setattr(torch.optim.Adam, "step", lambda adam: rates.append(adam.param_groups[0]["lr"]))
    losses = reader.train(model, losses_of(model), 50, 3.0, "")
    assert len(losses) == 50 and rates[:3] == pytest.approx([1, 2, 3]) and rates[-1] == pytest.approx(3 / 48)
    assert np.diff(rates)[3:] == pytest.approx(np.full(46, -3 / 48))


def test_an_update_is_of_its_own_loss_in_training_mode(monkeypatch):
    model, kept = Roberta(CONFIG).eval(), []

    def losses():
        for parameter in (model.embedding, model.positions):
            assert model.training
            yield parameter.sum()

    def step(optimizer):
        kept.append({name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()})

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    reader.train(model, losses(), 2, 0.1, "")
    assert kept == [{"embedding"}, {"positions"}]


def test_a_loss_that_is_not_finite_is_one_line():
    model = Roberta(CONFIG)
    with pytest.raises(InputError, match="loss"):
        reader.train(model, (torch.inf * loss for loss in losses_of(model)), 1, 0.1, "")
