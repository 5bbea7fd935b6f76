"""Tokenizers: any text survives; files of them are read and kept; BPE and words are learned."""

import functools
import io
import json
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import tokenizers
from accelerated.data.config import ENCODINGS, DataConfig
from accelerated.data.corpus import count_words
from accelerated.data.sources import Source, Text, source_of_path
from accelerated.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    PackagedTokenizer,
    SentencePieceTokenizer,
    open_tokenizer,
    run_tokenizer,
    tokenizer_of_ranks,
    train_bpe,
    train_words,
)
from accelerated.program.errors import InputError
from accelerated.training.options import vocabulary_of
from tests.helpers.programs import refusal
from tests.helpers.texts import SINGLE_BYTES, flipped_bits, show_ranks, small_encoding

SMALL = BpeTokenizer("small", small_encoding())
RANKS = dict(zip(SMALL.spellings[:-1], range(261), strict=True))  # without the special token
TEXT = Path(tokenizers.__file__).read_bytes()[:3000]
DAMAGED = "it is damaged or missing; restore it from a copy of the run"
ADVICE = "give a file of tiktoken ranks, a tokenizer.json, a SentencePiece .model, or one of bytes"
WIKITEXT = " \n = The Title = \n \n The cat <unk> the é cat . \n The dog @-@ sat . \n"


def folder_of(path, **texts):
    """A Source of splits with these texts, made below a folder."""
    for split, text in texts.items():
        (path / split).mkdir(parents=True)
        (path / split / "a.txt").write_text(text)
    return source_of_path(str(path))


def tokenizers_package(needs):
    """The package tokenizers; skips the test without it."""
    return pytest.importorskip("tokenizers", reason=f"{needs} needs the extra bpe")


def check_kept(tokenizer, text):
    """Fail unless the ids of a text spell it, by as many bytes, and are those of its bytes."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode()
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()


@given(st.binary(max_size=60))
def test_any_bytes_survive_as_bytes(text):
    tokens = ByteTokenizer()
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert tokens.token_bytes[ids].sum() == len(text)


@given(st.text(max_size=30).map(lambda text: text + "the anthem thé<|endoftext|>"))
def test_any_text_survives_bpe_and_none_of_it_is_a_special_token(text):
    check_kept(SMALL, text)
    assert SMALL.encode(text).tolist() == SMALL.encoding.encode_ordinary(text)


@given(st.binary(max_size=60))
def test_bytes_that_are_not_utf_8_become_replacement_characters_in_bpe(text):
    kept = text.decode(errors="replace")
    assert SMALL.encode(text).tolist() == SMALL.encode(kept).tolist()


# tiktoken's encodings and files of ranks


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("Hash mismatch")], ids=repr)
def test_an_encoding_that_cannot_be_fetched_is_refused_with_advice(monkeypatch, error):
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=error))
    words = refusal(open_tokenizer, "gpt2")
    assert words.startswith(f"--tokenizer gpt2: tiktoken cannot fetch it ({error})")
    assert "TIKTOKEN_CACHE_DIR" in words


def test_encodings_have_as_many_ids_as_our_table_says(monkeypatch):
    """The vocabulary must be known before anything is fetched; tiktoken 0.14's own counts."""
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(tiktoken_ext.openai_public, name, lambda *a, **k: {})
    constructors = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS
    for name in ENCODINGS.keys() - {"bytes"}:
        described = constructors[name]()
        last = max(described["special_tokens"].values())
        assert ENCODINGS[name] == described.get("explicit_n_vocab", last + 1), name
    pieces = constructors["gpt2"]()["pat_str"]
    assert pieces == tokenizers.GPT2_PIECES, "text is not cut as GPT-2 cuts it"


LINES = show_ranks(RANKS).splitlines(keepends=True)
RANKS_FILES = {
    "in another order": b"".join(reversed(LINES)),
    "without the last line's end": b"".join(LINES)[:-1],
    "with wide columns": b"".join(LINES).replace(b" ", b"  "),
}


@pytest.mark.parametrize("form", RANKS_FILES)
def test_a_ranks_file_is_the_encoding_in_any_form_that_tiktoken_reads(tmp_path, form):
    path = tmp_path / "small.tiktoken"
    path.write_bytes(RANKS_FILES[form])
    opened = open_tokenizer(str(path))
    assert opened.fingerprint == tokenizer_of_ranks("other name", RANKS).fingerprint
    assert opened.encode(TEXT).tolist() == SMALL.encode(TEXT).tolist()
    assert opened.vocabulary == vocabulary_of(DataConfig(tokenizer=str(path))) == 261
    assert opened.dtype == np.uint16


def test_ranks_in_another_order_are_another_tokenizer():
    swapped = RANKS | {b"th": 258, b" the": 256}
    ours = tokenizer_of_ranks("small", RANKS)
    assert ours.fingerprint != tokenizer_of_ranks("small", swapped).fingerprint
    cuts = {"pat_str": r"\S+|\s+", "mergeable_ranks": RANKS, "special_tokens": {}}
    other = BpeTokenizer("small", tiktoken.Encoding("small", **cuts))
    assert other.vocabulary == ours.vocabulary
    assert ours.fingerprint != other.fingerprint, "its words are cut otherwise"


GOOD = show_ranks(RANKS)
NO_TOKENIZERS = {  # {what: (name, content)}
    "no base64": ("ranks", GOOD + b"!! 261"),
    "no number": ("ranks", GOOD + b"eHl6 five"),  # xyz
    "a rank twice": ("ranks", GOOD + b"eHl6 5"),
    "a token twice": ("ranks", GOOD + b"dGg= 261"),  # th
    "a byte missing": ("ranks", GOOD.replace(b"gA== 128", b"eHl6 128")),
    "no JSON": ("a.json", b"{"),
    "no tokenizer": ("a.json", b'{"model": 3}'),
    "an empty model": ("a.model", b""),
    "a page": ("a.model", b"<html>"),
    "an unknown token that is missing": (
        "words.json",
        b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}',
    ),
}


@pytest.mark.parametrize("what", NO_TOKENIZERS)
def test_other_files_than_tokenizers_are_refused(tmp_path, what):
    name, content = NO_TOKENIZERS[what]
    package = "tokenizers" if name.endswith(".json") else "sentencepiece"
    pytest.importorskip(package, reason="opening its files needs that package")
    path = tmp_path / name
    path.write_bytes(content)
    words = refusal(open_tokenizer, str(path))
    assert words.startswith(f"{path} cannot be used: ")
    assert ADVICE in words


# What a run keeps


def kept(kind, path):
    """A tokenizer that a run keeps, and the DataConfig that names it."""
    if kind == "words":
        return words_of(WIKITEXT, 12), DataConfig(train_words=12)
    if kind == "ranks":
        return tokenizer_of_ranks("bpe", RANKS), DataConfig(train_bpe=261)
    (path / "some.json").write_bytes(packaged())
    name = str(path / "some.json")
    if kind == "sentencepiece":
        name = str(path / "some.model")
        (path / "some.model").write_bytes(sentencepiece_model())
    return open_tokenizer(name), DataConfig(tokenizer=name)


KEPT = pytest.mark.parametrize("kind", ["ranks", "words", "package", "sentencepiece"])


@KEPT
def test_a_run_keeps_its_tokenizer(tmp_path, kind):
    opened, data = kept(kind, tmp_path)
    assert opened.vocabulary == vocabulary_of(data)
    path = tmp_path / data.tokenizer_file
    opened.save(path)
    assert DataConfig(tokenizer=str(path)).tokenizer_file == path.name
    for same in (run_tokenizer(tmp_path, data), open_tokenizer(str(path))):
        assert same.fingerprint == opened.fingerprint
        assert same.spellings == opened.spellings
        assert same.encode(TEXT).tolist() == opened.encode(TEXT).tolist()


@KEPT
def test_a_flipped_bit_of_a_kept_tokenizer_is_noticed(tmp_path, kind):
    """By the file's form, or by the fingerprint, which a checkpoint keeps.

    Otherwise it is the same tokenizer written in another way.
    """
    opened, data = kept(kind, tmp_path)
    path = tmp_path / data.tokenizer_file
    opened.save(path)
    noticed = 0
    for content in flipped_bits(path.read_bytes(), 60):
        path.write_bytes(content)
        try:
            changed = run_tokenizer(tmp_path, data)
        except InputError as error:
            assert str(error).startswith(str(path))
            assert str(error).endswith(DAMAGED)
            noticed += 1
            continue
        if changed.fingerprint != opened.fingerprint:
            noticed += 1
        else:
            assert changed.spellings == opened.spellings
    assert noticed > 50


# Learned tokens


def test_a_bpe_is_learned_from_the_training_split_alone(tmp_path):
    """The most frequent pair is merged; of equally frequent ones that of the smallest ids.

    No merge crosses words.
    """
    tokenizers_package("learning")
    train = "thé the ab ab ab, \x00\x00 " * 99
    texts = {"train": train, "valid": "zqzq " * 999, "test": "xyxy " * 999}
    source = folder_of(tmp_path / "in", **texts)
    merged = [b"ab", b" ab", b"th", b" th", b"\xc3\xa9", b"\x00\x00", b" \x00\x00"]
    assert train_bpe(source, 263).spellings == SINGLE_BYTES + merged
    words = "--train-bpe 300: the training split has only 266 different tokens; give at most that"
    assert refusal(train_bpe, source, 300) == words


def words_of(text, vocabulary):
    """The closed vocabulary of a text."""
    tokenizers_package("counting")
    texts = [("train", Text("x", (text.encode,))), ("valid", None)]
    return train_words(Source("x", (), lambda: texts), vocabulary)


@given(st.text(alphabet="ab é<\n\t\xa0", max_size=40), st.integers(2, 9))
def test_a_text_is_its_words_and_line_ends(text, size):
    """A word of the vocabulary is one id; others are <unk>, and white space is blanks."""
    expected = []
    for line in text.split("\n"):
        expected += [*line.split(), "\n"]
    expected.pop()  # the last line has no end
    learned = words_of(text, min(size, len({*expected, "\n", "<unk>"})))
    words = [spelling[1:].decode() for spelling in learned.spellings]
    shown = [part if part in words else "<unk>" for part in expected]
    ids = learned.encode(text)
    assert [words[i] for i in ids] == shown
    assert learned.encode(text.encode()).tolist() == ids.tolist()
    assert learned.decode(ids).decode() == "".join(" " + part for part in shown)
    assert learned.token_bytes[ids].sum() == len(learned.decode(ids))

    assert {"\n", "<unk>"} <= set(words)
    order = [(-shown.count(word), word) for word in words]
    assert order == sorted(order), "the most frequent first, as adaptive softmax needs it"


def test_words_of_the_training_split_alone_are_counted(tmp_path):
    texts = {"train": "seven seven eight\nnine", "valid": "ten ten ten eleven", "test": "two two"}
    source = folder_of(tmp_path / "in", **texts)
    spellings = train_words(source, 4).spellings
    assert spellings == [b" seven", b" \n", b" <unk>", b" eight"], "<unk> stands for nine"
    spellings = train_words(source, 5).spellings
    assert spellings == [b" seven", b" \n", b" eight", b" nine", b" <unk>"]
    words = "--train-words 6: the training split has only 5 different tokens; give at most that"
    assert refusal(train_words, source, 6) == words


COUNTS = {
    "of a training split": lambda text: words_of(text, 3),
    "of a document": lambda text: count_words(text.encode()),
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_words_are_counted_without_a_list_of_them(count):
    """A list takes 12 times the memory of this text."""
    text = "word " * 100_000
    count("import what is needed")
    tracemalloc.start()
    count(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * len(text)


def test_a_large_vocabulary_has_32_bit_ids():
    """WikiText's own has 267,735 entries."""
    text = "".join(f"w{number}\n" for number in range(1 << 16))
    large = words_of(text, (1 << 16) + 2)
    assert large.dtype == np.uint32
    assert large.decode(large.encode("w65535 nobody\n")) == b" w65535 <unk> \n"


# The package tokenizers


@functools.cache
def packaged():
    """The contents of a tokenizer.json of bytes, learned from a source file of ours."""
    package = tokenizers_package("a .json")
    made = package.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT.decode()], 700, special_tokens=["<|end|>"])
    made.post_processor = package.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    made.enable_truncation(5)
    made.enable_padding(length=500)
    return made.to_str(pretty=True).encode()


@given(text=st.text(max_size=40).map(lambda text: text + "def f(x):<|end|> é"))
def test_a_packaged_tokenizer_of_bytes_keeps_all_text(text):
    """It adds no token, truncates and pads nothing, and text never becomes a special token."""
    model = PackagedTokenizer("some.json", packaged())
    check_kept(model, text)
    ids = model.encode(text)
    assert 0 not in ids
    assert ids.dtype == np.uint16


def test_words_in_pieces_are_spelled_with_blanks():
    """As in BERT: what is not in the vocabulary is unknown."""
    package = tokenizers_package("a .json")
    pieces = ["[UNK]", "def", "f", "(", "x", ")", ":", "return", "##s"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = package.Tokenizer(package.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    model = PackagedTokenizer("some.json", made.to_str().encode())
    ids = model.encode("def f(x):\n returns  y")
    assert model.decode(ids) == b" def f ( x ) : returns [UNK]"
    assert model.vocabulary == len(model.spellings) == len(pieces)


def test_a_character_without_a_token_is_spelled_by_its_bytes():
    """As in Llama, whose tokens have a sign for the blank."""
    package = tokenizers_package("a .json")
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "d", "e", "f"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = package.Tokenizer(package.models.BPE(vocabulary, [], byte_fallback=True))
    made.pre_tokenizer = package.pre_tokenizers.Metaspace()
    model = PackagedTokenizer("some.json", made.to_str().encode())
    assert model.decode(model.encode("def é漢")).decode() == " def é漢"


def test_a_folder_with_vocabulary_and_merges_is_a_tokenizer(tmp_path):
    """As GPT-2 and RoBERTa are published."""
    described = json.loads(packaged())["model"]
    merges = [" ".join(pair) for pair in described["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(described["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    data = DataConfig(tokenizer=str(tmp_path))
    opened = open_tokenizer(data.tokenizer)
    same = PackagedTokenizer("some.json", packaged())
    assert opened.encode(TEXT).tolist() == same.encode(TEXT).tolist()
    opened.save(tmp_path / data.tokenizer_file)
    assert run_tokenizer(tmp_path, data).fingerprint == opened.fingerprint


# SentencePiece


@functools.cache
def sentencepiece_model(**options):
    """The contents of a .model that the package learned from a source file of ours.

    Unless options say otherwise it keeps all text.
    """
    package = pytest.importorskip(
        "sentencepiece", reason="a .model needs the package sentencepiece: .[sentencepiece]"
    )
    kept = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    kept |= {"add_dummy_prefix": False, "byte_fallback": True}
    model = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.decode().splitlines()),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **(kept | options),
    )
    return model.getvalue()


ANY_TEXT = st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=40)


@given(ANY_TEXT.map(lambda text: text + "def  f(x):\n</s> é漢"))
def test_a_sentencepiece_model_keeps_text_and_counts_its_bytes(text):
    """Its ids are the package's; special tokens of the model are spelled out.

    What is left out is U+2581, which stands for a blank in such a vocabulary.
    """
    import sentencepiece

    ours = SentencePieceTokenizer("some.model", sentencepiece_model())
    check_kept(ours, text)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    assert ours.encode(text).tolist() == theirs.encode(text)
    assert ours.vocabulary == theirs.vocab_size()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_sentencepiece_model_that_normalises_counts_the_bytes_of_what_it_spells(kind):
    """As usual ones do: with a blank before the first word, one for several, and <unk>."""
    options = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    options |= {"add_dummy_prefix": True, "byte_fallback": False, "model_type": kind}
    ours = SentencePieceTokenizer("some.model", sentencepiece_model(**options))
    ids = ours.encode("def\n  ｆ漢")
    assert ours.decode(ids).decode() == " def f<unk>"
    assert ours.token_bytes[ids].sum() == len(" def f<unk>")


def test_no_character_is_cut_where_a_text_is_cut_for_learning(monkeypatch):
    monkeypatch.setattr(tokenizers, "LEARNING_PIECE", 3)
    text = "thé 中文。"
    source = Source("", (), lambda: [("train", Text("", (text.encode,)))])
    assert "".join(tokenizers.training_pieces(source)) == text
