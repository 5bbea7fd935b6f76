"""Tokenizers: any bytes survive; ranks are read, saved and learned; a missing encoding is refused with advice."""

import hashlib
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
from documents import small_encoding
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import tokenizers as tokenizer
from accelerated.data.config import ENCODINGS, DataConfig
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import BpeTokenizer, ByteTokenizer, open_tokenizer, show_ranks, train_bpe
from accelerated.program.errors import InputError
from accelerated.training.options import vocabulary_of


@pytest.fixture(scope="module")
def gpt2():
    return BpeTokenizer("small", small_encoding())


@given(text=st.binary(max_size=60))
def test_any_bytes_survive(gpt2, text):
    for tokens in (ByteTokenizer(), gpt2):
        ids = tokens.encode(text)
        assert tokens.decode(ids) == text and tokens.token_bytes[ids].sum() == len(text)


@given(text=st.text(max_size=30))
def test_text_is_its_utf_8(gpt2, text):
    assert gpt2.encode(text).tolist() == gpt2.encode(text.encode()).tolist() == gpt2.encoding.encode_ordinary(text)


def test_gpt2_tokens(gpt2):
    ids = gpt2.encode("the anthem thé")
    assert gpt2.decode(ids) == "the anthem thé".encode() and len(ids) < len("the anthem thé".encode())
    assert ids.dtype == np.uint16 and gpt2.token_bytes[gpt2.encode(" the")].tolist() == [4]
    assert vocabulary_of(DataConfig(tokenizer="gpt2")) == 50257
    assert gpt2.encode("<|endoftext|>").max() < gpt2.encoding.n_vocab - 1, "text is never a special token"


def test_bytes_that_are_not_utf_8_are_tokens_of_their_own(gpt2):
    """Each becomes the token of that byte; the text between them is encoded without them."""
    ids = gpt2.encode(b"the\xff\xfe the\xc3\xa9\xc3").tolist()
    assert ids == [*gpt2.encode("the").tolist(), 255, 254, *gpt2.encode(" the\xe9").tolist(), 0xC3]


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("Hash mismatch"), ConnectionError("refused")])
def test_an_encoding_that_cannot_be_fetched_is_refused_with_advice(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(InputError) as caught:
        open_tokenizer("gpt2")
    message = str(caught.value)
    assert "--tokenizer gpt2" in message and "TIKTOKEN_CACHE_DIR" in message and type(error).__name__ in message
    for file in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{file}"
        assert f"{address} as {hashlib.sha1(address.encode()).hexdigest()}" in message


def test_the_advice_names_the_file_that_tiktoken_fetches(monkeypatch, tmp_path):
    """tiktoken fetches the address whose hash names the copy."""
    asked = []

    def read(address):
        asked.append(address)
        raise OSError("offline")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.load.read_file", read)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(InputError, match="TIKTOKEN_CACHE_DIR"):
        open_tokenizer("gpt2")
    assert asked == [tokenizer.ADDRESS + tokenizer.FILES["gpt2"][0]]


def ranks_of(encoding):
    return {encoding.decode_single_token_bytes(token): token for token in range(encoding.n_vocab - 1)}  # without special


def test_a_ranks_file_is_the_encoding(tmp_path, gpt2):
    path = tmp_path / "small.tiktoken"
    path.write_bytes(show_ranks(list(ranks_of(small_encoding()))))
    assert path.read_bytes().startswith(b"AA== 0\nAQ== 1\n") and path.read_bytes().endswith(b"w6k= 260\n")
    tokens = open_tokenizer(str(path))
    text = "the anthem thé <|endoftext|>".encode()
    assert tokens.encode(text).tolist() == gpt2.encode(text).tolist() and tokens.decode(tokens.encode(text)) == text
    assert tokens.vocabulary == vocabulary_of(DataConfig(tokenizer=str(path))) == 261 and tokens.dtype == np.uint16
    assert tokens.fingerprint == tokenizer.tokenizer_of_ranks("other name", ranks_of(small_encoding())).fingerprint
    swapped = ranks_of(small_encoding()) | {b"th": 258, b" the": 256}
    assert tokens.fingerprint != tokenizer.tokenizer_of_ranks("small", swapped).fingerprint


def test_a_run_keeps_its_ranks(tmp_path, gpt2):
    learned = tokenizer.tokenizer_of_ranks("bpe", ranks_of(small_encoding()))
    tokenizer.save_ranks(tmp_path, learned)
    kept = tokenizer.run_tokenizer(tmp_path, SimpleNamespace(own_ranks=True))
    assert kept.fingerprint == learned.fingerprint and kept.spellings == learned.spellings
    assert tokenizer.run_tokenizer(tmp_path, SimpleNamespace(own_ranks=False, tokenizer="bytes")).name == "bytes"
    with pytest.raises(InputError, match=r"cannot write .*; give another --out"):
        tokenizer.save_ranks(tmp_path / "nowhere", learned)


def test_a_flipped_bit_of_a_runs_ranks_is_noticed(tmp_path):
    """By the file's form, or else by the fingerprint, which a checkpoint keeps."""
    learned = tokenizer.tokenizer_of_ranks("bpe", ranks_of(small_encoding()))
    tokenizer.save_ranks(tmp_path, learned)
    path, run = tmp_path / tokenizer.RANKS, SimpleNamespace(own_ranks=True)
    right, rng = path.read_bytes(), random.Random(0)
    for bit in (0, 8 * len(right) - 1, *(rng.randrange(8 * len(right)) for _ in range(100))):
        content = bytearray(right)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            assert tokenizer.run_tokenizer(tmp_path, run).fingerprint != learned.fingerprint, bit
        except InputError as error:
            assert str(error) == f"{path} is damaged; restore it from a copy of the run"


def test_a_runs_ranks_have_one_form(tmp_path):
    """A file that --tokenizer names may have any that tiktoken reads."""
    lines = show_ranks(list(ranks_of(small_encoding()))).splitlines(keepends=True)
    for other in (b"".join(reversed(lines)), b"".join(lines) + b"\n", b"".join(lines)[:-1], b"".join(lines).replace(b" ", b"  ")):
        (tmp_path / tokenizer.RANKS).write_bytes(other)
        assert open_tokenizer(str(tmp_path / tokenizer.RANKS)).vocabulary == 261
        with pytest.raises(InputError, match="is damaged; restore it from a copy of the run"):
            tokenizer.run_tokenizer(tmp_path, SimpleNamespace(own_ranks=True))
    with pytest.raises(InputError, match=r"cannot read .*nowhere.*No such file.*; restore it from a copy of the run"):
        tokenizer.run_tokenizer(tmp_path / "nowhere", SimpleNamespace(own_ranks=True))


@pytest.mark.parametrize(
    "line,words",
    [
        (b"<html>", "line 262: not a token in base64 and its rank"), (b"eHl6 2 3", "line 262: not a token"),
        (b"eHl6 300", "ranks of its 262 tokens are not 0..261, each once"), (b"eHl6 5", "each once"),
        (b"eHl6 five", "line 262: not a token"),
    ],
)  # fmt: skip
def test_other_files_than_ranks_are_refused(tmp_path, line, words):
    path = tmp_path / "ranks"
    path.write_bytes(show_ranks(list(ranks_of(small_encoding()))) + line + b"\n")
    with pytest.raises(InputError, match=words) as caught:
        open_tokenizer(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_ranks_need_every_byte(tmp_path):
    ranks = ranks_of(small_encoding())
    without = [token for token in ranks if token != b"\x80"]
    (tmp_path / "ranks").write_bytes(show_ranks(without))
    with pytest.raises(InputError, match="has no token for byte 128"):
        open_tokenizer(str(tmp_path / "ranks"))
    with pytest.raises(
        InputError, match=r"cannot read --tokenizer .*; give a file of ranks or one of bytes, mu-law, gpt2, .*nearest: cl100k"
    ):
        open_tokenizer("cl100k")


def test_encodings_have_as_many_ids_as_our_table_says():
    """The vocabulary must be known before anything is fetched; tiktoken 0.14's own counts."""
    for name, constructor in tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS.items():
        if name in ENCODINGS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *a, **k: {})
                patch.setattr(tiktoken_ext.openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *a, **k: {})
                found = constructor()
            special = max(found["special_tokens"].values())
            assert ENCODINGS[name] == found.get("explicit_n_vocab", special + 1), name
    assert ENCODINGS.keys() - {"bytes", "mu-law"} == tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS.keys()


@given(text=st.text(alphabet="aé字😀", max_size=6), cut=st.integers(0, 24))
def test_a_cut_off_character_is_left_for_the_next_piece(text, cut):
    piece = text.encode()[:cut]
    assert tokenizer.whole_characters(piece) == len(piece.decode(errors="ignore").encode())


@given(text=st.binary(max_size=30))
def test_whole_characters_end_before_a_cut_off_one(text):
    """Only the beginning of a character that the end cuts off is left out."""
    end = tokenizer.whole_characters(text)
    assert len(text) - 3 <= end <= len(text)
    try:
        text.decode()
        assert end == len(text)
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            assert end == error.start
        elif end < len(text):
            assert text[end] >= 0xC0


def test_long_text_without_words_is_cut_anyway(monkeypatch, gpt2):
    monkeypatch.setattr(tokenizer, "LONGEST_PIECE", 40)
    assert gpt2.last_cut(b"1234 " * 7) == 0 and gpt2.last_cut("é1".encode() * 20) == 60
    assert gpt2.last_cut("é1".encode() * 20 + b"\xc3") == 60
    assert gpt2.last_cut(b"ab cd ef") == 5 and gpt2.last_cut("中文。字1".encode()) == 6
    assert gpt2.last_cut(b"a \xff\xff b c\xff") == 6, "bytes that are not UTF-8 count as one byte each"
    assert ByteTokenizer().last_cut("aé".encode()[:-1]) == 1


def test_a_bpe_is_learned(tmp_path):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    (tmp_path / "a.txt").write_bytes("the anthem of the hour, thé; ".encode() * 99)
    source = source_of_path(DataConfig(str(tmp_path / "a.txt")))
    learned = train_bpe(source, 262)
    assert learned.vocabulary == 262 and learned.spellings[:256] == [bytes([byte]) for byte in range(256)]
    assert b"th" in learned.spellings[256:259] and all(len(text) > 1 for text in learned.spellings[256:])
    for text in ("the thé, the hour".encode(), bytes(range(256)) * 2, b"", "中\u0000".encode()):
        assert learned.decode(learned.encode(text)) == text
    assert len(learned.encode("the hour")) < 7
    assert train_bpe(source, 262).fingerprint == learned.fingerprint
    with pytest.raises(InputError, match=r"the training split has words for only 2.. tokens; give at most that"):
        train_bpe(source, 999)


@given(text=st.binary(max_size=60))
def test_any_bytes_survive_learned_tokens(text):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    ranks = tokenizer.learn_ranks(["the anthem of the hour, thé; " * 9, "\x00\x01é" * 9], 270)
    learned = tokenizer.tokenizer_of_ranks("bpe", ranks)
    ids = learned.encode(text)
    assert learned.decode(ids) == text and learned.token_bytes[ids].sum() == len(text)


def test_only_the_training_split_is_learned_from(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    (tmp_path / "a.txt").write_text("aaaa bbbb " * 900 + "zqzqzq " * 100)
    pieces, learn = [], tokenizer.learn_ranks
    monkeypatch.setattr(tokenizer, "learn_ranks", lambda some, size: learn(pieces.append(list(some)) or pieces[0], size))
    train_bpe(source_of_path(DataConfig(str(tmp_path / "a.txt"))), 257)
    assert "".join(pieces[0]).encode() == (tmp_path / "a.txt").read_bytes()[: 9700 * 90 // 100]


def test_the_bytes_alphabet_is_that_of_tokenizers():
    tokenizers = pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    symbols = tokenizer.byte_of_symbol()
    assert set(symbols) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) and sorted(symbols.values()) == list(range(256))
    text = "aé \n\x00\xadz"
    [(written, _)] = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert bytes(symbols[symbol] for symbol in written) == text.encode()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match="--train-bpe needs the package tokenizers; install the extra"):
        tokenizer.check_package()
