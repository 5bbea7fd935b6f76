"""Losses by token, position and word: sums that nothing is lost from, equal to loops written out."""

import dataclasses
import json
import math
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_block_recurrent import SMALL as RECURRENT
from test_pretrained_recurrence import SMALL as WINDOWED

from accelerated.block_recurrent import BlockRecurrent
from accelerated.data.tokenizers import ByteTokenizer
from accelerated.data.windows import Document, cut
from accelerated.errors import InputError
from accelerated.evaluation import frequency as measures
from accelerated.evaluation.frequency import (
    FrequencyRow,
    by_frequency,
    distinct_words,
    draw_frequency,
    frequency_lines,
    word_counts,
    words_in_pieces,
    words_of,
)
from accelerated.evaluation.positions import PositionRow, by_position, doubling_ranges, draw_positions, position_lines
from accelerated.evaluation.score import as_record, evaluate, token_nats
from accelerated.pretrained_recurrence import PretrainedRecurrence

BYTES = ByteTokenizer()


class MergedTokenizer:
    """A tiktoken encoding whose tokens hold white space, nothing else, or several words."""

    ranks = (*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", b"\n\n", b"a ", b"a b", b"\xc3\xa9", b" a b")
    encoding = tiktoken.Encoding(
        "merged", pat_str=r"(?s).+", mergeable_ranks={token: rank for rank, token in enumerate(ranks)}, special_tokens={}
    )
    vocabulary = len(ranks)
    token_bytes = np.array([len(token) for token in ranks])

    def encode(self, text):
        return np.array(self.encoding.encode_ordinary(text), np.uint16)

    def decode(self, ids):
        return self.encoding.decode_bytes([int(token) for token in ids])


MERGED = MergedTokenizer()
TOKENIZERS = {"bytes": BYTES, "merged": MERGED}
texts = st.text("theab \n\t\r\x0b\x0cé\xa0.", max_size=40)
either = st.sampled_from([BYTES, MERGED])


def document_from(text, tokenizer, scored=None):
    """A Document whose arrays may not be written to; all of it is scored by one broadcast True, unless a mask says otherwise."""
    ids = tokenizer.encode(text)
    ids.flags.writeable = False
    size = max(len(ids) - 1, 0)
    scored = np.broadcast_to(True, size) if scored is None else np.resize(np.array(scored, bool), size)
    return Document(text, ids[:-1], ids[1:], scored)


@st.composite
def documents_and_tokenizer(draw, least=0):
    """Documents of which some tokens are scored, at least one of them of that many tokens."""
    tokenizer, masks = draw(either), st.none() | st.lists(st.booleans(), min_size=1, max_size=5)
    documents = [document_from(draw(texts), tokenizer, draw(masks)) for _ in range(draw(st.integers(0, 4)))]
    documents += [document_from(draw(texts) + "he" * least, tokenizer, draw(masks))] if least else []
    return documents, tokenizer


def model_of(kind, tokenizer):
    """A small model over the tokenizer's vocabulary, its weights large enough to make a difference."""
    config = RECURRENT if kind == "block-recurrent" else WINDOWED
    changes = {"block-recurrent": {}, "overlapping": {"overlap": 4}, "disjoint": {"overlap": 0}, "plain": {"vectors": 0}}[kind]
    config = dataclasses.replace(config, vocabulary=max(256, len(tokenizer.token_bytes)), **changes)
    model = (BlockRecurrent if kind == "block-recurrent" else PretrainedRecurrence)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model


KINDS = ("block-recurrent", "overlapping", "disjoint", "plain")
MODELS = {}  # built once, in double precision


def model_for(kind, tokenizer):
    key = (kind, type(tokenizer).__name__)
    MODELS[key] = MODELS.get(key) or model_of(kind, tokenizer)
    return MODELS[key]


@torch.no_grad()
def nats_one_by_one(model, document, clear):
    """Each segment alone, each scored prediction alone."""
    nats, config, state = [math.nan] * len(document.inputs), model.config, model.initial_state(1)
    for w in cut(len(document.inputs) + 1, config.segment, getattr(config, "overlap", 0)):
        tokens = torch.zeros(1, config.segment, dtype=torch.long)
        for place in range(w.start, w.stop):
            tokens[0, place - w.start] = int(document.inputs[place])
        logits, state, _ = model(tokens, model.initial_state(1) if clear else state)
        for place in range(w.first - 1, w.stop):
            if document.scored[place]:
                nats[place] = -logits[0, place - w.start].log_softmax(-1)[int(document.targets[place])].item()
    return nats


@settings(max_examples=40)
@given(corpus=documents_and_tokenizer(least=1), kind=st.sampled_from(KINDS), lanes=st.integers(1, 5), clear=st.booleans())
def test_every_token_has_the_loss_of_documents_read_one_by_one(corpus, kind, lanes, clear):
    documents, tokenizer = corpus
    model = model_for(kind, tokenizer)
    nats = token_nats(model, documents, tokenizer, lanes, clear)
    for actual, document in zip(nats, documents, strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, nats_one_by_one(model, document, clear), rtol=1e-9)
    score = evaluate(model, documents, tokenizer, lanes, clear)
    assert sum(np.nansum(own) for own in nats) == pytest.approx(score.nats, rel=1e-12)
    assert sum(np.isfinite(own).sum() for own in nats) == score.tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clear", [False, True])
def test_documents_of_all_lengths_in_lanes_that_fall_idle(kind, clear):
    """In two lanes one ends while the other is in the middle of its second document."""
    documents = [document_from("the baa\n" * n + "é", MERGED) for n in (0, 6, 1, 0, 8, 5)] + [document_from("", MERGED)]
    model = model_for(kind, MERGED)
    expected = [nats_one_by_one(model, document, clear) for document in documents]
    assert [len(own) for own in expected] == [0, *(len(MERGED.encode("the baa\n" * n + "é")) - 1 for n in (6, 1, 0, 8, 5)), 0]
    for lanes in (1, 2, 3, 8):
        for actual, own in zip(token_nats(model, documents, MERGED, lanes, clear), expected, strict=True):
            np.testing.assert_allclose(actual, own, rtol=1e-9)


def test_dropout_is_off_and_the_mode_is_put_back():
    model = BlockRecurrent(dataclasses.replace(RECURRENT, vocabulary=256, dropout=0.5)).train()
    documents = [document_from("the theatre " * 4, BYTES)]
    first, again = (token_nats(model, documents, BYTES, 1)[0] for _ in range(2))
    assert (first == again).all() and model.training and all(p.grad is None for p in model.parameters())


@given(first=st.integers(1, 9), length=st.integers(0, 200))
def test_doubling_ranges(first, length):
    ranges = list(doubling_ranges(first, length))
    assert [place for start, stop in ranges for place in range(start, stop)] == list(range(length))
    for index, (start, stop) in enumerate(ranges):
        assert start == (0 if index == 0 else first * 2 ** (index - 1)) and stop == min(length, first * 2**index)


def random_nats(documents, seed):
    """Losses as token_nats gives them."""
    rng = np.random.default_rng(seed)
    return [np.where(document.scored, rng.exponential(3.0, len(document.inputs)), np.nan) for document in documents]


@given(corpus=documents_and_tokenizer(), first=st.integers(1, 9), seed=st.integers(0, 3))
def test_rows_by_position_are_those_of_counting_token_by_token(corpus, first, seed):
    documents, tokenizer = corpus
    nats = random_nats(documents, seed)
    rows = by_position(nats, documents, tokenizer, first)
    longest = max((len(document.inputs) for document in documents), default=0)
    assert [(row.start, row.stop) for row in rows] == list(doubling_ranges(first, longest + 1 if longest else 0))
    for row in rows:
        total, tokens, text_bytes, reached = 0.0, 0, 0, set()
        for number, document in enumerate(documents):
            for place, target in enumerate(document.targets):
                if row.start <= place + 1 < row.stop:
                    reached.add(number)
                    if document.scored[place]:
                        total, tokens = total + nats[number][place], tokens + 1
                        text_bytes += len(tokenizer.decode([target]))
        assert (row.documents, row.tokens, row.text_bytes) == (len(reached), tokens, text_bytes)
        assert row.nats == pytest.approx(total, rel=1e-12)
        if tokens:
            assert row.bits_per_token == pytest.approx(total / tokens / math.log(2))
            assert row.bits_per_byte == pytest.approx(total / text_bytes / math.log(2))
    assert sum(row.tokens for row in rows) == sum(int(document.scored.sum()) for document in documents)


def test_positions_at_the_edges_of_ranges():
    """A document of 10 tokens: its token p, p = 1 .. 9, has loss 10^p."""
    documents = [document_from("0123456789", BYTES), document_from("01234", BYTES), document_from("0", BYTES)]
    nats = [10.0 ** np.arange(1, 10), np.zeros(4), np.zeros(0)]
    rows = by_position(nats, documents, BYTES, 4)
    assert [(row.start, row.stop, row.documents, row.nats, row.tokens) for row in rows] == [
        (0, 4, 2, 1110.0, 6), (4, 8, 2, 11110000.0, 5), (8, 10, 1, 1100000000.0, 2),
    ]  # fmt: skip
    assert by_position([], [], BYTES, 4) == by_position(nats[2:], documents[2:], BYTES, 4) == []


def test_a_model_that_has_diverged_is_seen():
    """NaN marks what is not scored; a scored token's NaN is not taken for that."""
    documents = [document_from("the the", BYTES, [True, False])]
    nats = [np.array([1.0, math.nan, math.nan, math.nan, 1.0, math.nan])]
    assert math.isnan(by_position(nats, documents, BYTES, 64)[0].nats)
    assert math.isnan(by_frequency(nats, documents, Counter(), BYTES)[-1].nats)
    whole = [np.array([1.0, math.nan, 1.0, math.nan, 1.0, math.nan])]
    assert by_position(whole, documents, BYTES, 64)[0].nats == by_frequency(whole, documents, Counter(), BYTES)[-1].nats == 3.0


def owners_byte_by_byte(text, tokens):
    """(words, owner of each token) of a text that is its tokens, both bytes."""
    words, word_at = [], []  # number of the word that each byte lies in, None for white space
    for at, byte in enumerate(text):
        if chr(byte) in " \t\n\r\x0b\x0c":
            word_at.append(None)
            continue
        if at and word_at[-1] is not None:
            words[-1] += bytes([byte])
        else:
            words.append(bytes([byte]))
        word_at.append(len(words) - 1)
    owners, at = [], 0
    for token in tokens:
        following = [word for word in word_at[at:] if word is not None]
        owners.append(following[0] if following else max(len(words) - 1, 0))
        at += len(token)
    return words or [b""], owners


@settings(max_examples=150)
@given(text=texts, tokenizer=either)
def test_words_are_those_of_looking_byte_by_byte(text, tokenizer):
    document = document_from(text, tokenizer)
    words, owners = words_of(document, tokenizer)
    ids = tokenizer.encode(text) if len(document.inputs) else []
    assert (words, owners.tolist()) == owners_byte_by_byte(tokenizer.decode(ids), [tokenizer.decode([token]) for token in ids])


def owners_of(*tokens):
    """Words, and the word that each of the tokens (bytes) belongs to, as text."""
    ids = np.array([MERGED.ranks.index(token) for token in tokens], np.uint16)
    words, owners = words_of(Document("", ids[:-1], ids[1:], np.ones(len(ids) - 1, bool)), MERGED)
    return words, [words[owner] for owner in owners]


def test_a_token_belongs_to_the_word_of_its_first_byte_that_is_not_white():
    assert owners_of(b"a", b" the", b"a", b"\n\n", b"b") == ([b"a", b"thea", b"b"], [b"a", b"thea", b"thea", b"b", b"b"])
    assert owners_of(b"\n", b"a b", b"a b", b"the") == ([b"a", b"ba", b"bthe"], [b"a", b"a", b"ba", b"bthe"])
    assert owners_of(b"b", b" ", b"\n\n") == ([b"b"], [b"b", b"b", b"b"]), "white space at the end belongs to the last word"
    assert owners_of(b" ", b"\t") == ([b""], [b"", b""]), "a text of white space alone is one empty word"
    assert owners_of(b"\xc2", b"\xa0", b"\x1c", b"\0") == ([b"\xc2\xa0\x1c\0"], [b"\xc2\xa0\x1c\0"] * 4), (
        "white space is ASCII's six"
    )


@settings(max_examples=100)
@given(
    some=st.lists(texts, max_size=3), tokenizer=either, size=st.integers(1, 9),
    wanted=st.sets(st.text("theabé", min_size=1, max_size=4).map(str.encode), max_size=9),
)  # fmt: skip
def test_words_are_counted_across_pieces(some, tokenizer, size, wanted):
    documents = [document_from(text, tokenizer) for text in some]
    expected = Counter(
        word for document in documents if len(document.inputs)
        for word in document.name.encode().split() if word in wanted
    )  # fmt: skip
    assert word_counts(documents, wanted, tokenizer, size) == expected
    every = distinct_words(documents, tokenizer)
    assert every == {word for document in documents if len(document.inputs) for word in document.name.encode().split()}
    assert sum(word_counts(documents, every, tokenizer, size).values()) == sum(
        len(document.name.encode().split()) for document in documents if len(document.inputs)
    )


def test_counting_holds_no_more_than_a_piece_in_memory():
    """Neither of a long document nor of a text without white space; and no more tokens than a piece are text at a time."""
    asked = []

    class Watched(ByteTokenizer):
        def decode(self, ids):
            asked.append(len(ids))
            return super().decode(ids)

    documents = [document_from(text, BYTES) for text in ("x" * 400_000, "ab the " * 50_000)]
    tracemalloc.start()
    counts = word_counts(documents, {b"the", b"xx"}, Watched(), size=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == {b"the": 50_000} and max(asked) == 1000 and peak < 100_000
    *_, last = words_in_pieces([b"ab", b"cdef" * 100, b"g"], longest=3)
    assert [len(word) for word in last] == [4]


def bucket_of(count):
    """Table 7: > 10K, 1K-10K, 100-1K, < 100."""
    if count > 10_000:
        return 0
    if count >= 1000:
        return 1
    return 2 if count >= 100 else 3


NAMES = ["more than 10,000", "1,000 to 10,000", "100 to 999", "fewer than 100", "all"]


@pytest.mark.parametrize("count", [0, 1, 99, 100, 999, 1000, 9999, 10_000, 10_001, 10**9])
def test_the_edges_of_the_buckets(count):
    documents = [document_from("x the", BYTES)]
    rows = by_frequency([np.array([1.0, 2, 3, 4])], documents, {b"the": count}, BYTES)
    assert [row.name for row in rows] == NAMES
    assert [(row.nats, row.words, row.tokens) for row in rows] == [
        (10.0, 1, 4) if index in (4, bucket_of(count)) else (0.0, 0, 0) for index in range(5)
    ], "the word that the first token is all of is not predicted, and does not count"


@settings(max_examples=100)
@given(corpus=documents_and_tokenizer(), seed=st.integers(0, 5), data=st.data())
def test_rows_by_frequency_are_those_of_counting_word_by_word(corpus, seed, data):
    documents, tokenizer = corpus
    nats, amounts = random_nats(documents, seed), st.sampled_from([0, 99, 100, 999, 1000, 10_000, 10_001])
    counts = Counter({word: data.draw(amounts) for word in sorted(distinct_words(documents, tokenizer))})
    expected = [[0.0, 0, 0] for _ in range(5)]
    for losses, document in zip(nats, documents, strict=True):
        ids = tokenizer.encode(document.name) if len(document.inputs) else []
        words, owners = owners_byte_by_byte(tokenizer.decode(ids), [tokenizer.decode([token]) for token in ids])
        for number, word in enumerate(words):
            own = [place - 1 for place in range(1, len(ids)) if owners[place] == number and document.scored[place - 1]]
            for row in (expected[bucket_of(counts[word])], expected[4]) if own else ():
                row[:] = row[0] + sum(losses[own]), row[1] + 1, row[2] + len(own)
    rows = by_frequency(nats, documents, counts, tokenizer)
    assert [row.name for row in rows] == NAMES
    for row, (total, words, tokens) in zip(rows, expected, strict=True):
        assert (row.words, row.tokens) == (words, tokens) and row.nats == pytest.approx(total, rel=1e-12)
        assert row.perplexity == pytest.approx(math.exp(total / words) if words else math.nan, nan_ok=True)
    assert rows[-1].nats == pytest.approx(sum(np.nansum(own) for own in nats), rel=1e-12)
    assert rows[-1].tokens == sum(int(document.scored.sum()) for document in documents)


def test_perplexity_is_per_word_and_infinite_beyond_a_double():
    assert FrequencyRow("all", 12.0, 4, 30).perplexity == pytest.approx(math.exp(3))
    assert FrequencyRow("all", 1e6, 2, 30).perplexity == math.inf
    assert math.isnan(FrequencyRow("all", 0.0, 0, 0).perplexity) and math.isnan(FrequencyRow("all", math.nan, 1, 1).perplexity)


POSITIONS = [PositionRow(0, 512, 3, 2048 * math.log(2), 1024, 2048), PositionRow(512, 700, 1, 0.0, 0, 0)]
FREQUENCIES = [FrequencyRow("more than 10,000", 1000 * math.log(4), 1000, 1500), FrequencyRow("all", 1e9, 2, 9)]


def test_rows_as_json():
    """Made of rows whose numbers came out of arrays."""
    [row] = by_position([np.array([math.log(2)])], [document_from("ab", BYTES)], BYTES, 8)
    record = json.loads(json.dumps(as_record(row), allow_nan=False))
    expected = {"start": 0, "stop": 2, "documents": 1, "nats": math.log(2), "tokens": 1, "text_bytes": 1}
    assert record == expected | {"bits_per_token": 1.0, "bits_per_byte": 1.0}
    rows = by_frequency([np.array([math.log(2)])], [document_from("ab", BYTES)], {}, BYTES)
    records = json.loads(json.dumps([as_record(row) for row in rows], allow_nan=False))
    assert records[0] == {"name": NAMES[0], "nats": 0.0, "words": 0, "tokens": 0, "perplexity": None}
    assert records[4] == {"name": "all", "nats": math.log(2), "words": 1, "tokens": 1, "perplexity": pytest.approx(2)}
    assert as_record(POSITIONS[1])["bits_per_byte"] is None and as_record(FREQUENCIES[1])["perplexity"] is None


def test_tables():
    cleared = [row._replace(nats=row.nats * 2) for row in POSITIONS]
    assert position_lines({"carried": POSITIONS, "memory cleared": cleared}) == [
        "bits per byte by the position of the predicted token in its document",
        "             position  documents        tokens     carried   memory cleared",
        "             0 to 511          3         1,024      1.0000           2.0000",
        "           512 to 699          1             0           -                -",
    ]
    assert frequency_lines([*FREQUENCIES, FrequencyRow("100 to 999", 0.0, 0, 0)]) == [
        "times in training        words        tokens   perplexity per word",
        "more than 10,000         1,000         1,500                     4",
        "all                          2             9                   inf",
        "100 to 999                   0             0                     -",
    ]


def test_a_package_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (lambda: draw_positions(tmp_path / "a.png", {"": POSITIONS}), lambda: draw_frequency("b.png", FREQUENCIES)):
        with pytest.raises(InputError, match="plots need the package matplotlib; install the extra"):
            draw()
    assert not list(tmp_path.iterdir())


def test_figures_are_written_whole_or_not_at_all(tmp_path):
    pytest.importorskip("matplotlib")
    draw_positions(tmp_path / "positions.png", {"carried": POSITIONS}, reach=100)
    draw_frequency(tmp_path / "frequency.svg", FREQUENCIES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frequency.svg", "positions.png"]
    assert (tmp_path / "positions.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "frequency.svg").read_bytes()
    for path, message in (
        (tmp_path / "no" / "a.png", "cannot draw .*there is no folder"),
        (tmp_path / "a.doc", r"ends in one of .*\.png"),
    ):
        with pytest.raises(InputError, match=message):
            draw_frequency(path, FREQUENCIES)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        draw_frequency(tmp_path / "folder.png", FREQUENCIES)
    assert not list(tmp_path.glob("*.writing"))


def test_what_figures_show(monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(measures, "save_figure", lambda figure, path: figures.append(figure))
    later = PositionRow(512, 1024, 1, 50 * math.log(2), 10, 100)
    draw_positions("a.png", {"carried": [POSITIONS[0], POSITIONS[1], later], "cleared": [POSITIONS[0]]}, reach=600)
    draw_positions("a.png", {"carried": [POSITIONS[0]]})
    draw_frequency("a.png", [FREQUENCIES[0], FrequencyRow("fewer than 100", 0.0, 0, 0), FREQUENCIES[1]])
    positions, alone, frequency = (figure.axes[0] for figure in figures)
    carried, cleared, reach = positions.lines
    np.testing.assert_allclose(carried.get_xydata(), [(256, 1.0), (768, 0.5)])
    np.testing.assert_allclose(cleared.get_xydata(), [(256, 1.0)])
    assert list(reach.get_xdata()) == [600, 600] and len(alone.lines) == 1
    assert positions.get_xscale() == "log" and positions.xaxis.get_transform().base == 2
    assert [text.get_text() for text in positions.get_legend().get_texts()] == [
        "carried",
        "cleared",
        "reach of attention, 600 tokens",
    ]
    assert [bar.get_height() for bar in frequency.patches] == pytest.approx([4, 1, 1]), "from 1 up"
    assert [label.get_text() for label in frequency.get_xticklabels()] == [
        "more than 10,000\n1,000 words", "fewer than 100\n0 words", "all\n2 words",
    ]  # fmt: skip
    assert [text.get_text() for text in frequency.texts] == ["4", "-", "inf"]
