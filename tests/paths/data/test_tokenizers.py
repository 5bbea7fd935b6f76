"""Tokenizers: any bytes survive; ranks, words and the package tokenizers' own are read and saved; BPE and words are learned."""

import functools
import json
import random
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import tokenizers as tokenizer
from accelerated.data.config import ENCODINGS, DataConfig
from accelerated.data.sources import Source, Text, source_of_path
from accelerated.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    open_tokenizer,
    run_tokenizer,
    train_words,
)
from accelerated.program.errors import InputError
from accelerated.training.options import vocabulary_of
from tests.helpers.programs import refusal
from tests.helpers.texts import show_ranks, small_encoding

SMALL = BpeTokenizer("small", small_encoding())
RANKS = dict(zip(SMALL.spellings[:-1], range(261), strict=True))  # without the special token
TEXT = Path(tokenizer.__file__).read_bytes()[:3000]
DAMAGED = "it is damaged or missing; restore it from a copy of the run"
ADVICE = "give a file of tiktoken ranks, a tokenizer.json, or one of bytes, mu-law, gpt2, "


def folder_of(path, **texts):
    """A Source of splits with these texts, made below a folder."""
    for split, text in texts.items():
        (path / split).mkdir(parents=True)
        (path / split / "a.txt").write_text(text)
    return source_of_path(DataConfig(str(path)))


@pytest.mark.parametrize("tokens", [ByteTokenizer(), SMALL], ids=["bytes", "bpe"])
@given(text=st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_any_text_survives_and_as_bytes_anything(tokens, text):
    ids, kept = (
        tokens.encode(text),
        text if tokens.name == "bytes" else text.decode(errors="replace").encode(),
    )
    assert tokens.decode(ids) == kept and tokens.token_bytes[ids].sum() == len(kept)


@given(text=st.text(max_size=30).map(lambda text: text + "the anthem thé<|endoftext|>"))
def test_text_is_never_a_special_token(text):
    assert (
        SMALL.encode(text).tolist()
        == SMALL.encode(text.encode()).tolist()
        == SMALL.encoding.encode_ordinary(text)
    )


# tiktoken's encodings and files of ranks


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("Hash mismatch")], ids=repr)
def test_an_encoding_that_cannot_be_fetched_is_refused_with_advice(monkeypatch, error):
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=error))
    words = refusal(open_tokenizer, "gpt2")
    assert (
        words.startswith(f"--tokenizer gpt2: tiktoken cannot fetch it ({error})")
        and "TIKTOKEN_CACHE_DIR" in words
    )


def test_encodings_have_as_many_ids_as_our_table_says(monkeypatch):
    """The vocabulary must be known before anything is fetched; tiktoken 0.14's own counts."""
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(tiktoken_ext.openai_public, name, lambda *a, **k: {})
    constructors = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS
    for name in ENCODINGS.keys() - {"bytes", "mu-law"}:
        described = constructors[name]()
        special = max(described["special_tokens"].values())
        assert ENCODINGS[name] == described.get("explicit_n_vocab", special + 1), name


def test_a_ranks_file_is_the_encoding_in_any_form_that_tiktoken_reads(tmp_path):
    path, lines = tmp_path / "small.tiktoken", show_ranks(RANKS).splitlines(keepends=True)
    whole, expected = b"".join(lines), tokenizer.tokenizer_of_ranks("other name", RANKS)
    for content in (b"".join(reversed(lines)), whole[:-1], whole.replace(b" ", b"  ")):
        path.write_bytes(content)
        tokens = open_tokenizer(str(path))
        assert (
            tokens.fingerprint == expected.fingerprint
            and tokens.encode(TEXT).tolist() == SMALL.encode(TEXT).tolist()
        )
    assert (
        tokens.vocabulary == vocabulary_of(DataConfig(tokenizer=str(path))) == 261
        and tokens.dtype == np.uint16
    )
    assert (
        tokens.fingerprint
        != tokenizer.tokenizer_of_ranks("small", RANKS | {b"th": 258, b" the": 256}).fingerprint
    )


NO_RANKS = [
    b"<html>",
    b"!! 261",
    b"eHl6 five",
    b"eHl6 5",
    b"dGg= 261",
]  # after good lines; in base64 eHl6 is xyz, dGg= is th


def test_other_files_than_tokenizers_are_refused(tmp_path):
    pytest.importorskip("tokenizers", reason="a .json needs the extra bpe")
    files = [("ranks", show_ranks(RANKS) + line) for line in NO_RANKS]
    files += [
        ("ranks", show_ranks(RANKS).replace(b"gA== 128", b"eHl6 128")),
        ("a.json", b"{"),
        ("a.json", b'{"model": 3}'),
    ]
    files += [
        (
            "words.json",
            b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}, "added_tokens": []}',
        )
    ]
    for name, content in files:
        (path := tmp_path / name).write_bytes(content)
        words = refusal(open_tokenizer, str(path))
        assert words.startswith(f"{path} cannot be used: ") and ADVICE in words, content[-20:]
    assert f"cannot read cl100k: No such file or directory; {ADVICE}" in refusal(
        open_tokenizer, "cl100k"
    )


# What a run keeps


def kept(kind, path):
    """A tokenizer that a run keeps, and the DataConfig that names it."""
    if kind == "words":
        return words_of(WIKITEXT, 12), DataConfig(train_words=12)
    if kind == "ranks":
        return tokenizer.tokenizer_of_ranks("bpe", RANKS), DataConfig(train_bpe=261)
    (path / "some.json").write_bytes(packaged("bytes"))
    return open_tokenizer(str(path / "some.json")), DataConfig(tokenizer=str(path / "some.json"))


@pytest.mark.parametrize("kind", ["ranks", "words", "package"])
def test_a_run_keeps_its_tokenizer_and_notices_a_flipped_bit(tmp_path, kind):
    """By the file's form; or by the fingerprint, which a checkpoint keeps; or it is the same tokenizer written otherwise."""
    opened, data = kept(kind, tmp_path)
    assert opened.vocabulary == vocabulary_of(data)
    path, rng, noticed = tmp_path / data.tokenizer_file, random.Random(0), 0
    opened.save(path)
    right = path.read_bytes()
    for same in (run_tokenizer(tmp_path, data), open_tokenizer(str(path))):
        assert (same.fingerprint, same.spellings) == (opened.fingerprint, opened.spellings)
        assert same.encode(TEXT).tolist() == opened.encode(TEXT).tolist()
    assert DataConfig(tokenizer=str(path)).tokenizer_file == path.name
    for bit in (0, 8 * len(right) - 1, *(rng.randrange(8 * len(right)) for _ in range(60))):
        path.write_bytes(
            right[: bit // 8] + bytes([right[bit // 8] ^ 1 << bit % 8]) + right[bit // 8 + 1 :]
        )
        try:
            changed = run_tokenizer(tmp_path, data)
            noticed += changed.fingerprint != opened.fingerprint
            assert (
                changed.fingerprint != opened.fingerprint or changed.spellings == opened.spellings
            ), bit
        except InputError as error:
            noticed += 1
            assert str(error).startswith(str(path)) and str(error).endswith(DAMAGED)
    assert noticed > 50


# Learned tokens


def test_a_bpe_is_learned_from_the_training_split_alone(tmp_path):
    """The most frequent pair is merged; of equally frequent ones that of the smallest ids. No merge crosses words."""
    pytest.importorskip(
        "tokenizers", reason="learning needs the extra bpe: pip install -e '.[bpe]'"
    )
    source = folder_of(
        tmp_path / "in",
        train="thé the ab ab ab, \x00\x00 " * 99,
        valid="zqzq " * 999,
        test="xyxy " * 999,
    )
    learned, single = tokenizer.train_bpe(source, 263), [bytes([byte]) for byte in range(256)]
    assert learned.spellings == [
        *single,
        b"ab",
        b" ab",
        b"th",
        b" th",
        b"\xc3\xa9",
        b"\x00\x00",
        b" \x00\x00",
    ]
    words = "--train-bpe 300: the training split has only 266 different tokens; give at most that"
    assert refusal(tokenizer.train_bpe, source, 300) == words


WIKITEXT = " \n = The Title = \n \n The cat <unk> the é cat . \n The dog @-@ sat . \n"


def words_of(text, vocabulary):
    """The closed vocabulary of a text."""
    pytest.importorskip(
        "tokenizers", reason="counting needs the extra bpe: pip install -e '.[bpe]'"
    )
    return train_words(
        Source("x", (), lambda: [("train", Text("x", (text.encode,))), ("valid", None)]), vocabulary
    )


@given(st.text(alphabet="ab é<\n\t\xa0", max_size=40), st.integers(2, 9))
def test_a_text_is_its_words_and_line_ends(text, size):
    """A word of the vocabulary is one id, by frequency as adaptive softmax needs it; others are <unk>, white space is blanks."""
    expected = [part for line in text.split("\n") for part in (*line.split(), "\n")][:-1]
    learned = words_of(text, min(size, len({*expected, "\n", "<unk>"})))
    words = [spelling[1:].decode() for spelling in learned.spellings]
    shown = [part if part in words else "<unk>" for part in expected]
    ids = learned.encode(text)
    assert [words[i] for i in ids] == shown and learned.encode(
        text.encode()
    ).tolist() == ids.tolist()
    assert learned.decode(ids).decode() == "".join(" " + part for part in shown)
    assert learned.token_bytes[ids].sum() == len(learned.decode(ids))
    order = [(-shown.count(word), word) for word in words]
    assert order == sorted(order) and {"\n", "<unk>"} <= set(words)


def test_words_of_the_training_split_alone_are_counted(tmp_path):
    source = folder_of(
        tmp_path / "in", train="seven seven eight\nnine", valid="ten ten ten eleven", test="two two"
    )
    assert train_words(source, 4).spellings == [b" seven", b" \n", b" <unk>", b" eight"], (
        "<unk> stands for nine"
    )
    assert train_words(source, 5).spellings == [b" seven", b" \n", b" eight", b" nine", b" <unk>"]
    words = "--train-words 6: the training split has only 5 different tokens; give at most that"
    assert refusal(train_words, source, 6) == words


def test_a_large_vocabulary_has_32_bit_ids():
    """Of WikiText's form, which is kept; WikiText's own has 267,735 entries."""
    learned = words_of(WIKITEXT, 12)
    assert (
        learned.decode(learned.encode(WIKITEXT)).decode() == WIKITEXT and learned.dtype == np.uint16
    )
    large = words_of("".join(f"w{number}\n" for number in range(1 << 16)), (1 << 16) + 2)
    assert (
        large.dtype == np.uint32
        and large.decode(large.encode("w65535 nobody\n")) == b" w65535 <unk> \n"
    )


# The package tokenizers


BYTES_OF_LLAMA = [f"<0x{byte:02X}>" for byte in range(256)]


@functools.cache
def packaged(kind):
    """The contents of a tokenizer.json of each kind, learned from a source file of ours."""
    package = pytest.importorskip("tokenizers", reason="needs the extra bpe: tokenizers")
    models, before, trainers = package.models, package.pre_tokenizers, package.trainers
    model, splitter, trainer, special = {
        "bytes": (
            models.BPE(),
            before.ByteLevel(add_prefix_space=False),
            trainers.BpeTrainer,
            ["<|end|>"],
        ),
        "like Llama": (
            models.BPE(byte_fallback=True),
            before.Metaspace(),
            trainers.BpeTrainer,
            BYTES_OF_LLAMA,
        ),
        "like BERT": (
            models.WordPiece(unk_token="[UNK]"),
            before.BertPreTokenizer(),
            trainers.WordPieceTrainer,
            ["[UNK]"],
        ),
    }[kind]
    made = package.Tokenizer(model)
    made.pre_tokenizer = splitter
    alphabet = before.ByteLevel.alphabet() if kind == "bytes" else []
    trained = trainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT.decode().splitlines(keepends=True), trained)
    if kind == "bytes":
        made.decoder = package.decoders.ByteLevel()
        made.post_processor = package.processors.TemplateProcessing(
            single="<|end|> $A", special_tokens=[("<|end|>", 0)]
        )
        made.enable_truncation(5)
        made.enable_padding(length=500)
    return made.to_str(pretty=kind == "bytes").encode()


@given(text=st.text(max_size=40))
def test_a_packaged_tokenizer_of_bytes_keeps_all_text(text):
    """It adds no token, truncates and pads nothing, and text never becomes a special token."""
    model, text = (
        tokenizer.PackagedTokenizer("some.json", packaged("bytes")),
        text + "def f(x):<|end|> é",
    )
    ids = model.encode(text)
    assert model.decode(ids) == text.encode() and model.token_bytes[ids].sum() == len(text.encode())
    assert (
        ids.tolist() == model.encode(text.encode()).tolist()
        and 0 not in ids
        and ids.dtype == np.uint16
    )


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("like BERT", "def f(x):\n returns  x", " def f ( x ) : returns x"),
        ("like Llama", "def f(x):\n return  é漢", " def f(x):\n return  é漢"),
    ],
)
def test_other_tokenizers_spell_the_text_as_they_normalise_it(kind, text, expected):
    """Also bytes that have no token of their own."""
    model = tokenizer.PackagedTokenizer("some.json", packaged(kind))
    assert model.decode(model.encode(text)).decode() == expected and model.vocabulary == len(
        model.spellings
    )


def test_a_folder_with_vocabulary_and_merges_is_a_tokenizer(tmp_path):
    """As GPT-2 and RoBERTa are published."""
    described = json.loads(packaged("bytes"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(described["vocab"]))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in described["merges"]) + "\n"
    )
    data = DataConfig(tokenizer=str(tmp_path))
    assert (
        data.tokenizer == str(tmp_path / "vocab.json") and data.tokenizer_file == "tokenizer.json"
    )
    opened = open_tokenizer(data.tokenizer)
    assert (
        opened.encode(TEXT).tolist()
        == tokenizer.PackagedTokenizer("some.json", packaged("bytes")).encode(TEXT).tolist()
    )
    opened.save(tmp_path / data.tokenizer_file)
    assert run_tokenizer(tmp_path, data).fingerprint == opened.fingerprint
