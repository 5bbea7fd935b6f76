"""Tokenizers: any text survives; files of them are read and kept; BPE and words are learned."""

import functools
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
from accelerated.data.sources import Source, Text, source_of_path
from accelerated.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    PackagedTokenizer,
    open_tokenizer,
    run_tokenizer,
    tokenizer_of_ranks,
    train_bpe,
    train_words,
)
from accelerated.training.options import vocabulary_of
from tests.helpers.programs import refusal
from tests.helpers.texts import SINGLE_BYTES, show_ranks, small_encoding, write

SMALL = BpeTokenizer("small", small_encoding())
RANKS = dict(zip(SMALL.spellings[:-1], range(261), strict=True))  # without the special token
TEXT = Path(tokenizers.__file__).read_bytes()[:3000]
DAMAGED = "it is damaged or missing; restore it from a copy of the run"
WIKITEXT = " \n = The Title = \n \n The cat <unk> the é cat . \n The dog @-@ sat . \n"


def source_of(path, **texts):
    """A Source of splits with these texts, made below a folder."""
    return source_of_path(str(write(path, {f"{split}/a.txt": texts[split] for split in texts})))


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


def test_an_encoding_that_cannot_be_fetched_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError("no network")))
    words = refusal(open_tokenizer, "gpt2")
    assert words.startswith("--tokenizer gpt2: tiktoken cannot fetch it (no network)")
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


GOOD = show_ranks(RANKS)
WRONG_RANKS = {
    "a rank twice": GOOD + b"eHl6 5",  # xyz
    "a byte missing": GOOD.replace(b"gA== 128", b"eHl6 128"),
}


@pytest.mark.parametrize("what", WRONG_RANKS)
def test_other_ranks_than_a_tokenizers_are_refused(tmp_path, what):
    path = tmp_path / "ranks"
    path.write_bytes(WRONG_RANKS[what])
    assert refusal(open_tokenizer, str(path)).startswith(f"{path} cannot be used: ")


# What a run keeps


def kept(kind, path):
    """A tokenizer that a run keeps, and the DataConfig that names it."""
    if kind == "words":
        return words_of(WIKITEXT, 12), DataConfig(train_words=12)
    if kind == "ranks":
        return tokenizer_of_ranks("bpe", RANKS), DataConfig(train_bpe=261)
    (path / "some.json").write_bytes(packaged())
    name = str(path / "some.json")
    return open_tokenizer(name), DataConfig(tokenizer=name)


@pytest.mark.parametrize("kind", ["ranks", "words", "package"])
def test_a_run_keeps_its_tokenizer(tmp_path, kind):
    """Damage that leaves a tokenizer: paths/test_safety.py."""
    opened, data = kept(kind, tmp_path)
    assert opened.vocabulary == vocabulary_of(data)
    path = tmp_path / data.tokenizer_file
    opened.save(path)
    assert DataConfig(tokenizer=str(path)).tokenizer_file == path.name
    for same in (run_tokenizer(tmp_path, data), open_tokenizer(str(path))):
        assert same.fingerprint == opened.fingerprint
        assert same.spellings == opened.spellings
        assert same.encode(TEXT).tolist() == opened.encode(TEXT).tolist()
    path.write_bytes(path.read_bytes()[1:-1] + b"{")
    assert refusal(run_tokenizer, tmp_path, data).endswith(DAMAGED)


# Learned tokens


def test_a_bpe_is_learned_from_the_training_split_alone(tmp_path):
    """The most frequent pair is merged; of equally frequent ones that of the smallest ids.

    No merge crosses words.
    """
    train = "thé the ab ab ab, \x00\x00 " * 99
    texts = {"train": train, "valid": "zqzq " * 999, "test": "xyxy " * 999}
    source = source_of(tmp_path, **texts)
    merged = [b"ab", b" ab", b"th", b" th", b"\xc3\xa9", b"\x00\x00", b" \x00\x00"]
    assert train_bpe(source, 263).spellings == SINGLE_BYTES + merged
    words = "--train-bpe 300: the training split has only 266 different tokens; give at most that"
    assert refusal(train_bpe, source, 300) == words


def words_of(text, vocabulary):
    """The closed vocabulary of a text."""
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
    source = source_of(tmp_path, **texts)
    spellings = train_words(source, 4).spellings
    assert spellings == [b" seven", b" \n", b" <unk>", b" eight"], "<unk> stands for nine"
    spellings = train_words(source, 5).spellings
    assert spellings == [b" seven", b" \n", b" eight", b" nine", b" <unk>"]
    words = "--train-words 6: the training split has only 5 different tokens; give at most that"
    assert refusal(train_words, source, 6) == words


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
    import tokenizers as package

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


def test_a_character_without_a_token_is_spelled_by_its_bytes():
    """As in Llama, whose tokens have a sign for the blank."""
    import tokenizers as package

    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "d", "e", "f"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = package.Tokenizer(package.models.BPE(vocabulary, [], byte_fallback=True))
    made.pre_tokenizer = package.pre_tokenizers.Metaspace()
    model = PackagedTokenizer("some.json", made.to_str().encode())
    assert model.decode(model.encode("def é漢")).decode() == " def é漢"


def test_pieces_of_a_normalised_text_count_the_bytes_of_what_they_spell():
    """As T5's do: one blank for several, one before the first word, and <unk>."""
    import tokenizers as package

    pieces = ["<unk>", "▁", "▁def", "d", "e", "f"]
    scored = [(piece, float(-number)) for number, piece in enumerate(pieces)]
    made = package.Tokenizer(package.models.Unigram(scored, 0))
    blanks = package.normalizers.Replace(package.Regex(r"\s+"), " ")
    made.normalizer = package.normalizers.Sequence([package.normalizers.NFKC(), blanks])
    made.pre_tokenizer = package.pre_tokenizers.Metaspace()
    ours = PackagedTokenizer("some.json", made.to_str().encode())
    ids = ours.encode("def\n  ｆ漢")
    assert ours.decode(ids).decode() == " def f<unk>"
    assert ours.token_bytes[ids].sum() == len(" def f<unk>")


def test_no_character_is_cut_where_a_text_is_cut_for_learning(monkeypatch):
    monkeypatch.setattr(tokenizers, "LEARNING_PIECE", 3)
    text = "thé 中文。"
    source = Source("", (), lambda: [("train", Text("", (text.encode,)))])
    assert "".join(tokenizers.training_pieces(source)) == text
