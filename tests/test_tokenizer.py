"""Tokenizers: any bytes survive, and a missing encoding is refused with what to do."""

import hashlib

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from accelerated import tokenizer
from accelerated.errors import InputError
from accelerated.tokenizer import ByteTokenizer, Gpt2Tokenizer, decodable_parts


def small_encoding():
    """All 256 bytes and a few merges, under GPT-2's splitting into words."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in (b"th", b"the", b" the", b"an", b"\xc3\xa9"):
        ranks[token] = len(ranks)
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    return tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})


@pytest.fixture(scope="module")
def gpt2():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken, "get_encoding", lambda name: small_encoding())
        return Gpt2Tokenizer()


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
    assert Gpt2Tokenizer.vocabulary == 50257
    assert gpt2.encode("<|endoftext|>").max() < gpt2.encoding.n_vocab - 1, "text is never a special token"


def test_bytes_that_are_no_utf_8_stand_alone():
    assert list(decodable_parts(b"ab\xff\xfec\xc3\xa9\xc3")) == [
        (b"ab", True), (b"\xff", False), (b"\xfe", False), ("c\xe9".encode(), True), (b"\xc3", False),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("Hash mismatch"), ConnectionError("refused")])
def test_an_encoding_that_cannot_be_fetched_is_refused_with_what_to_do(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(InputError) as caught:
        Gpt2Tokenizer()
    message = str(caught.value)
    assert "--tokenizer gpt2" in message and "TIKTOKEN_CACHE_DIR" in message and type(error).__name__ in message
    for file in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{file}"
        assert f"{file} as {hashlib.sha1(address.encode()).hexdigest()}" in message


def test_the_names_of_the_copies_are_those_that_tiktoken_looks_for(monkeypatch, tmp_path):
    """tiktoken reads a copy before it fetches; a copy with another content than OpenAI's is not taken."""
    asked = []

    def read(address):
        asked.append(address)
        raise OSError("offline")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.load.read_file", read)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(InputError, match="TIKTOKEN_CACHE_DIR"):
        tokenizer.load_encoding("gpt2")
    assert asked == [tokenizer.GPT2_ADDRESS + tokenizer.GPT2_FILES[0]]
