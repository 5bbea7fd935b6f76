"""Tokenizers: any bytes survive; ranks, words and the package tokenizers' own are read and saved; BPE and words are learned."""

import functools
import json
import random
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import corpus
from accelerated.data import tokenizers as tokenizer
from accelerated.data.config import ENCODINGS, DataConfig
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import BpeTokenizer, ByteTokenizer, WordTokenizer, open_tokenizer, run_tokenizer, train_words
from accelerated.program.errors import InputError
from accelerated.training.options import vocabulary_of
from tests.helpers.programs import refusal
from tests.helpers.texts import show_ranks, small_encoding

SMALL = BpeTokenizer("small", small_encoding())
RANKS = dict(zip(SMALL.spellings[:-1], range(261), strict=True))  # without the special token
TEXT = Path(tokenizer.__file__).read_bytes()[:3000]
DAMAGED = "it is damaged or missing; restore it from a copy of the run"


def folder_of(path, **texts):
    """A Source of splits with these texts, made below a folder."""
    for split, text in texts.items():
        (path / split).mkdir(parents=True)
        (path / split / "a.txt").write_text(text)
    return source_of_path(DataConfig(str(path)))


@functools.cache
def learned_bpe():
    """A BPE learned from a few words."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: pip install -e '.[bpe]'")
    ranks = tokenizer.learn_ranks(["the anthem of the hour, thé; " * 9, "\x00\x01é" * 9], 270)
    return tokenizer.tokenizer_of_ranks("bpe", ranks)


@pytest.mark.parametrize("made", [ByteTokenizer, lambda: SMALL, learned_bpe], ids=["bytes", "bpe", "learned"])
@given(text=st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_any_bytes_survive(made, text):
    tokens = made()
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text and tokens.token_bytes[ids].sum() == len(text)


@given(text=st.text(max_size=30).map(lambda text: text + "the anthem thé<|endoftext|>"))
def test_text_is_its_utf_8_and_bytes_that_are_not_are_tokens_of_their_own(text):
    """Text is never a special token."""
    ids = SMALL.encode(text).tolist()
    assert ids == SMALL.encode(text.encode()).tolist() == SMALL.encoding.encode_ordinary(text)
    assert SMALL.encode(b"\xff" + text.encode() + b"\xfe\xc3").tolist() == [0xFF, *ids, 0xFE, 0xC3]


def test_an_encoding_that_cannot_be_fetched_is_refused_with_advice(monkeypatch):
    for error in (OSError("no network"), ValueError("Hash mismatch")):
        monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=error))
        words = refusal(open_tokenizer, "gpt2")
        assert words.startswith(f"--tokenizer gpt2: tiktoken cannot fetch it ({error})") and "TIKTOKEN_CACHE_DIR" in words


def test_encodings_have_as_many_ids_as_our_table_says(monkeypatch):
    """The vocabulary must be known before anything is fetched; tiktoken 0.14's own counts."""
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(tiktoken_ext.openai_public, name, lambda *a, **k: {})
    constructors = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS
    assert ENCODINGS.keys() - {"bytes", "mu-law"} == constructors.keys()
    for name, constructor in constructors.items():
        described = constructor()
        special = max(described["special_tokens"].values())
        assert ENCODINGS[name] == described.get("explicit_n_vocab", special + 1), name


def test_a_ranks_file_is_the_encoding_in_any_form_that_tiktoken_reads(tmp_path):
    path, lines = tmp_path / "small.tiktoken", show_ranks(RANKS).splitlines(keepends=True)
    whole = b"".join(lines)
    assert whole.startswith(b"AA== 0\nAQ== 1\n") and whole.endswith(b"w6k= 260\n")
    for content in (whole, b"".join(reversed(lines)), whole + b"\n", whole[:-1], whole.replace(b" ", b"  ")):
        path.write_bytes(content)
        tokens = open_tokenizer(str(path))
        assert tokens.fingerprint == tokenizer.tokenizer_of_ranks("other name", RANKS).fingerprint
        assert tokens.vocabulary == vocabulary_of(DataConfig(tokenizer=str(path))) == 261 and tokens.dtype == np.uint16
    assert tokens.encode(TEXT).tolist() == SMALL.encode(TEXT).tolist()
    swapped = RANKS | {b"th": 258, b" the": 256}
    assert tokens.fingerprint != tokenizer.tokenizer_of_ranks("small", swapped).fingerprint


ADVICE = "give a file of tiktoken ranks, a tokenizer.json, or one of bytes, mu-law, gpt2, "
NO_RANKS = [b"<html>", b"eHl6 2 3", b"eHl6 five", b"!! 261", b"eHl6 300", b"eHl6 5", b"dGg= 261"]  # lines after good ones


def test_other_files_than_ranks_are_refused(tmp_path):
    """Or none, or a folder."""
    path = tmp_path / "ranks"
    for content in (*(show_ranks(RANKS) + line for line in NO_RANKS), show_ranks(RANKS).replace(b"gA== 128", b"eHl6 128")):
        path.write_bytes(content)
        words = refusal(open_tokenizer, str(path))
        assert words.startswith(f"{path} cannot be used: it is no list of tokens in base64, all 256 bytes") and ADVICE in words
    assert f"cannot read cl100k: No such file or directory; {ADVICE}" in refusal(open_tokenizer, "cl100k")
    assert f": Is a directory; {ADVICE}" in refusal(open_tokenizer, "")
    missing = refusal(run_tokenizer, tmp_path / "nowhere", DataConfig(train_bpe=261))
    assert missing == f"cannot read {tmp_path}/nowhere/tokenizer.tiktoken: No such file or directory; {DAMAGED}"


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
    opened.save(tmp_path)
    path, rng, others = tmp_path / data.tokenizer_file, random.Random(0), 0
    right = path.read_bytes()
    for name in (run_tokenizer(tmp_path, data), open_tokenizer(str(path))):
        assert (name.fingerprint, name.spellings) == (opened.fingerprint, opened.spellings)
        assert name.encode(TEXT).tolist() == opened.encode(TEXT).tolist()
    assert DataConfig(tokenizer=str(path)).tokenizer_file == path.name
    for bit in (0, 8 * len(right) - 1, *(rng.randrange(8 * len(right)) for _ in range(60))):
        content = bytearray(right)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            changed = run_tokenizer(tmp_path, data)
            others += changed.fingerprint != opened.fingerprint
            assert changed.fingerprint != opened.fingerprint or changed.spellings == opened.spellings, bit
        except InputError as error:
            others += 1
            assert str(error).startswith(str(path)) and str(error).endswith(DAMAGED)
    assert others > 50
    assert run_tokenizer(tmp_path, DataConfig()).name == "bytes"
    with pytest.raises(InputError, match=r"cannot write .*; give another --out"):
        opened.save(tmp_path / "nowhere")


def naive_bpe(texts, vocabulary):
    """The tokens of a byte-level BPE: the most frequent pair is merged; of equally frequent ones that of the smallest ids."""
    words = Counter(word.encode() for text in texts for word in regex.findall(tokenizer.WORDS, text))
    split = {word: [bytes([byte]) for byte in word] for word in words}
    ids = {bytes([byte]): number for number, byte in enumerate(tokenizer.byte_of_symbol().values())}  # by their symbols
    while len(ids) < vocabulary:
        pairs = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        first, second = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]))
        ids.setdefault(first + second, len(ids))
        for parts in split.values():
            for i in range(len(parts) - 1):
                if parts[i : i + 2] == [first, second]:
                    parts[i : i + 2] = [first + second]
    return [*ids][256:]


@given(texts=st.lists(st.text(alphabet="abé ,\n1\x00", max_size=30), min_size=1, max_size=4), merges=st.integers(1, 12))
def test_a_learned_bpe_has_the_merges_of_a_naive_one(texts, merges):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: pip install -e '.[bpe]'")
    too_many = refusal(tokenizer.learn_ranks, texts, 9999)
    most = int(regex.search("the training split has words for only (.*) tokens; give at most that", too_many)[1])
    merges = min(merges, most - 256)
    learned = tokenizer.learn_ranks(texts, 256 + merges)
    assert [*learned] == [*(bytes([byte]) for byte in range(256)), *naive_bpe(texts, 256 + merges)]
    assert [*learned.values()] == [*range(256 + merges)]


def test_a_bpe_is_learned_from_the_training_split_alone(tmp_path):
    """In pieces of 64 KiB; its text is all that is learned from."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: pip install -e '.[bpe]'")
    text = "the anthem of the hour, thé; " * 99
    learned = tokenizer.train_bpe(folder_of(tmp_path / "in", train=text, valid="zqzq " * 999, test="xyxy " * 999), 262)
    assert learned.vocabulary == 262 and learned.spellings[256:] == naive_bpe([text], 262)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for name in ("some.json", "vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    names = (str(tmp_path / name) for name in ("some.json", "vocab.json"))
    said = [refusal(tokenizer.tokenizers_package), *(refusal(open_tokenizer, name) for name in names)]
    assert all("needs the package tokenizers; install the extra" in words for words in said)


@functools.cache
def packaged(kind):
    """The contents of a tokenizer.json of each kind, learned from a source file of ours."""
    package = pytest.importorskip("tokenizers", reason="needs the extra bpe: tokenizers")
    models, before, trainers = package.models, package.pre_tokenizers, package.trainers
    bytes_of_llama, unknown = [f"<0x{byte:02X}>" for byte in range(256)], {"unk_token": "[UNK]"}
    model, splitter, trainer, special = {
        "bytes": (models.BPE(), before.ByteLevel(add_prefix_space=False), trainers.BpeTrainer, ["<|end|>"]),
        "like T5": (
            models.Unigram(),
            before.Sequence([before.WhitespaceSplit(), before.Metaspace()]),
            trainers.UnigramTrainer,
            ["[UNK]"],
        ),
        "like Llama": (models.BPE(byte_fallback=True), before.Metaspace(), trainers.BpeTrainer, bytes_of_llama),
        "like BERT": (models.WordPiece(**unknown), before.BertPreTokenizer(), trainers.WordPieceTrainer, ["[UNK]", "[CLS]"]),
    }[kind]
    options = {"bytes": {"initial_alphabet": before.ByteLevel.alphabet()}, "like T5": unknown}.get(kind, {})
    trainer = trainer(vocab_size=700, special_tokens=special, show_progress=False, **options)
    made = package.Tokenizer(model)
    made.pre_tokenizer = splitter
    made.train_from_iterator(TEXT.decode().splitlines(keepends=True), trainer)
    if kind == "bytes":
        made.decoder = package.decoders.ByteLevel()
        made.post_processor = package.processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
        made.enable_truncation(5)
    return made.to_str(pretty=kind == "bytes").encode()


def model_of(kind):
    return tokenizer.PackagedTokenizer("some.json", packaged(kind))


@given(text=st.text(max_size=40))
def test_a_packaged_tokenizer_of_bytes_keeps_all_text(text):
    """It adds no token, truncates nothing, and text never becomes a special token."""
    model, text = model_of("bytes"), text + "def f(x):<|end|> é"
    ids = model.encode(text)
    assert model.decode(ids) == text.encode() and model.token_bytes[ids].sum() == len(text.encode())
    assert ids.tolist() == model.encode(text.encode()).tolist() and 0 not in ids and ids.dtype == np.uint16


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("like T5", "def f(x):\n return  x", " def f(x): return x"),
        ("like BERT", "def f(x):\n return  x", " def f ( x ) : return x"),
        ("like Llama", "def f(x):\n return  x", " def f(x):\n return  x"),
        ("like Llama", "é漢", " é漢"),
    ],
)
def test_other_tokenizers_spell_the_text_as_they_normalise_it(kind, text, expected):
    """Also bytes that have no token of their own; and if the file leaves the model's type out, as BERT's."""
    model = model_of(kind)
    assert model.decode(model.encode(text)).decode() == expected and model.vocabulary == len(model.spellings)
    assert model.token_bytes.tolist() == [len(text) for text in model.spellings] and not model.takes_pieces
    if kind == "like BERT":
        described = json.loads(packaged(kind))
        del described["model"]["type"]
        assert tokenizer.PackagedTokenizer("a.json", json.dumps(described).encode()).spellings == model.spellings


def test_a_folder_with_vocabulary_and_merges_is_a_tokenizer(tmp_path, monkeypatch):
    """As GPT-2 and RoBERTa are published."""
    described = json.loads(packaged("bytes"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(described["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in described["merges"]) + "\n")
    data = DataConfig(tokenizer=str(tmp_path))
    assert data.tokenizer == str(tmp_path / "vocab.json") and data.tokenizer_file == "tokenizer.json"
    opened = open_tokenizer(data.tokenizer)
    assert opened.encode(TEXT).tolist() == model_of("bytes").encode(TEXT).tolist()
    (tmp_path / "run").mkdir()
    opened.save(tmp_path / "run")
    assert run_tokenizer(tmp_path / "run", data).fingerprint == opened.fingerprint
    monkeypatch.chdir(tmp_path.parent)
    assert DataConfig(tokenizer=tmp_path.name).tokenizer == f"{tmp_path.name}/vocab.json"
    monkeypatch.setitem(ENCODINGS, tmp_path.name, 9)
    assert DataConfig(tokenizer=tmp_path.name).tokenizer == tmp_path.name, "it may be named as an encoding"


@pytest.mark.parametrize(
    "files",
    [
        *({"a.json": text} for text in ("", "{", "[]", '{"model": 3}', "\xff", '{"version": "1.0", "model": {"type": "x"}}')),
        *({"vocab.json": v, "merges.txt": m} for v, m in (('{"a": 0}', "a b c d"), ("[]", "a b"), ("{", ""))),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, files):
    pytest.importorskip("tokenizers", reason="needs the extra bpe")
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode("latin1"))
    path = tmp_path / next(iter(files))
    words = refusal(open_tokenizer, str(path))
    assert words.startswith(f"{path} cannot be used: ") and ADVICE in words


WIKITEXT = " \n = The Title = \n \n The cat <unk> the é cat . \n The dog @-@ sat . \n"
TEXTS = st.text(alphabet="ab é<\n\t\xa0", max_size=40)


def words_of(text, vocabulary):
    """The closed vocabulary of a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "pieces_of", lambda _: [text.encode()])
        return train_words(tokenizer.Source("x", (), lambda: [("train", None), ("valid", None)]), vocabulary)


def entries_of(text):
    """How many entries its vocabulary has at most."""
    return len({word for line in text.split("\n") for word in line.split()} - {"<unk>"}) + 2


@given(TEXTS, st.integers(2, 9))
def test_a_text_is_its_words_and_line_ends(text, size):
    """Each word of the vocabulary is one id, all others are <unk>; nothing else is lost but the kind of white space.

    Ids are in the order of frequency, as adaptive softmax needs them; equally frequent words are in order.
    """
    learned = words_of(text, min(size, entries_of(text)))
    expected = [part for line in text.split("\n") for part in (*line.split(), "\n")][:-1]
    shown = [part if part in learned.ids else "<unk>" for part in expected]
    ids = learned.encode(text)
    assert [learned.words[i] for i in ids] == shown and learned.encode(text.encode()).tolist() == ids.tolist()
    assert learned.decode(ids).decode() == "".join(" " + part for part in shown)
    assert learned.token_bytes[ids].sum() == len(learned.decode(ids))
    order = [(-shown.count(word), word) for word in learned.words]
    assert order == sorted(order) and {"\n", "<unk>"} <= set(learned.words)


def test_only_the_training_split_is_counted(tmp_path, monkeypatch):
    """In pieces of any size: no word is cut."""
    read = corpus.read_bytes
    monkeypatch.setattr(corpus, "read_bytes", lambda text: read(text, 3))
    source = folder_of(tmp_path / "in", train="seven seven eight\nnine", valid="ten ten ten eleven", test="two two")
    learned = train_words(source, 4)
    assert learned.words == ["seven", "\n", "<unk>", "eight"], "<unk> stands for nine"
    assert vocabulary_of(DataConfig(train_words=4)) == learned.vocabulary == 4
    assert words_of("x ! <unk>\n", 4).words == ["\n", "!", "<unk>", "x"], "equally frequent ones are in order"
    assert train_words(source, 5).words == ["seven", "\n", "eight", "nine", "<unk>"]
    words = "--train-words 6: the training split has 3 words, 5 with the line's end and <unk>; give at most that"
    assert refusal(train_words, source, 6) == words


@pytest.mark.parametrize("content", [b"a\n\n", b"<unk>\na\n", b"\n<unk>\na\na\n", b"\xff\n\n<unk>\n"])
def test_what_is_no_vocabulary_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.words").write_bytes(content)
    assert refusal(run_tokenizer, tmp_path, DataConfig(train_words=3)).endswith(DAMAGED)
    with pytest.raises(ValueError, match="train_words is 2; it must be 0 or at least 3"):
        DataConfig(train_words=2)


def test_a_large_vocabulary_has_32_bit_ids():
    """Of WikiText's form, which is kept; WikiText's own has 267,735 entries."""
    learned = words_of(WIKITEXT, 12)
    assert learned.decode(learned.encode(WIKITEXT)).decode() == WIKITEXT and learned.dtype == np.uint16
    words = ["\n", "<unk>", *(f"w{number}" for number in range(1 << 16))]
    large = WordTokenizer("words", words)
    assert large.dtype == np.uint32 and large.decode(large.encode("w65535 nobody\n")) == b" w65535 <unk> \n"
