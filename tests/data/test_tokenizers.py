"""Tokenizers: any bytes survive; ranks are read, saved and learned; a missing encoding is refused with advice."""

import functools
import hashlib
import io
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
from documents import small_encoding
from hypothesis import example, given
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
    learned.save(tmp_path)
    kept = tokenizer.run_tokenizer(tmp_path, DataConfig(train_bpe=261))
    assert kept.fingerprint == learned.fingerprint and kept.spellings == learned.spellings
    assert tokenizer.run_tokenizer(tmp_path, DataConfig()).name == "bytes"
    with pytest.raises(InputError, match=r"cannot write .*; give another --out"):
        learned.save(tmp_path / "nowhere")


def test_a_flipped_bit_of_a_runs_ranks_is_noticed(tmp_path):
    """By the file's form, or else by the fingerprint, which a checkpoint keeps."""
    learned = tokenizer.tokenizer_of_ranks("bpe", ranks_of(small_encoding()))
    learned.save(tmp_path)
    path, run = tmp_path / tokenizer.RANKS, DataConfig(train_bpe=261)
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
            tokenizer.run_tokenizer(tmp_path, DataConfig(train_bpe=261))
    with pytest.raises(InputError, match=r"cannot read .*nowhere.*No such file.*; restore it from a copy of the run"):
        tokenizer.run_tokenizer(tmp_path / "nowhere", DataConfig(train_bpe=261))


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
        tokenizer.tokenizers_package()


# Models of sentencepiece

LIKE_T5 = {"model_type": "unigram"}  # one blank for all white space, a blank before the first word
LIKE_LLAMA = {  # byte fallback, white space as it is, a blank before the first word
    "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
}  # fmt: skip
EXACT = LIKE_LLAMA | {"add_dummy_prefix": False}
ACROSS_WORDS = LIKE_T5 | {"split_by_whitespace": False}


@functools.cache
def pieces(**options):
    """The bytes of a sentencepiece model that was trained on a source file of ours."""
    package = pytest.importorskip("sentencepiece", reason="needs the extra pieces: sentencepiece")
    lines, model = Path(tokenizer.__file__).read_text().splitlines(), io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=600, minloglevel=2, **options
    )
    return model.getvalue()


def model_of(**options):
    return tokenizer.SentencePieceTokenizer("some.model", pieces(**options))


@given(st.text(alphabet="ab ce\n\té€漢", max_size=40))
@example("  two  blanks\n\n")
def test_pieces_spell_the_text_as_its_model_normalises_it(text):
    exact = model_of(**EXACT)
    assert exact.decode(exact.encode(text)) == text.encode(), "byte fallback keeps what has no piece"
    assert exact.token_bytes[exact.encode(text)].sum() == len(text.encode())
    like_t5 = model_of(**LIKE_T5)
    known = "".join("\N{REPLACEMENT CHARACTER}" if character in "é€漢" else character for character in text)
    found = like_t5.decode(like_t5.encode(text)).decode()
    assert re.sub("\N{REPLACEMENT CHARACTER}+", "?", found).split() == re.sub("\N{REPLACEMENT CHARACTER}+", "?", known).split()


def test_a_model_of_pieces_is_a_tokenizer(tmp_path):
    path = tmp_path / "some.MODEL"
    path.write_bytes(pieces(**LIKE_T5))
    opened = open_tokenizer(str(path))
    assert opened.vocabulary == vocabulary_of(DataConfig(tokenizer=str(path))) == 600 and opened.dtype == np.uint16
    package = tokenizer.sentencepiece_package().SentencePieceProcessor(model_file=str(path))
    text = "def f(x):\n    return  x"
    assert opened.encode(text).tolist() == opened.encode(text.encode()).tolist() == package.encode(text)
    assert opened.decode(opened.encode(text)) == b" def f(x): return x" and opened.name == str(path) and opened.spells_text
    assert (
        opened.decode([1, 2]) == b""
        and model_of(**EXACT).encode(b"a\xff").tolist() == model_of(**EXACT).encode("a\ufffd").tolist()
    )
    assert opened.fingerprint != model_of(**EXACT).fingerprint


@pytest.mark.parametrize(("options", "cut"), [(LIKE_T5, True), (EXACT, True), (LIKE_LLAMA, False), (ACROSS_WORDS, False)])
def test_text_is_cut_only_where_pieces_begin(options, cut):
    model, text = model_of(**options), Path(tokenizer.__file__).read_bytes()[:3000]
    found = {at: model.last_cut(text[:at]) for at in range(100, 3000, 7)}
    assert any(found.values()) == cut and all(end < at for at, end in found.items())
    for end in set(found.values()):
        apart = [*model.encode(text[:end]), *model.encode(text[end:])]
        assert apart == model.encode(text).tolist()
    assert model.last_cut(b"a" * tokenizer.LONGEST_PIECE + "é".encode()[:1]) == tokenizer.LONGEST_PIECE


def test_a_run_keeps_its_model_of_pieces(tmp_path):
    model, data = model_of(**LIKE_T5), DataConfig(tokenizer="gone.model")
    model.save(tmp_path)
    assert tokenizer.run_tokenizer(tmp_path, data).fingerprint == model.fingerprint and data.tokenizer_file == tokenizer.PIECES
    path, rng = tmp_path / tokenizer.PIECES, random.Random(0)
    for _ in range(30):
        content = bytearray(model.model)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            assert tokenizer.run_tokenizer(tmp_path, data).fingerprint != model.fingerprint
        except InputError as error:
            assert str(error) == f"{path} is damaged; restore it from a copy of the run"


def test_what_is_no_model_of_pieces_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "some.model"
    path.write_bytes(b"no model")
    with pytest.raises(
        InputError, match=r"--tokenizer .*some\.model is damaged or not a sentencepiece model; give another file$"
    ):
        open_tokenizer(str(path))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for opened in (lambda: open_tokenizer(str(path)), lambda: tokenizer.run_tokenizer(tmp_path, DataConfig(tokenizer="a.model"))):
        (tmp_path / tokenizer.PIECES).write_bytes(b"no model")
        with pytest.raises(
            InputError, match=r"a \.model needs the package sentencepiece; install the extra: pip install -e '\.\[p"
        ):
            opened()
