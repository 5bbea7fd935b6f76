"""Texts, documents and tokenizers for the tests."""

import base64
import io
import os
import random
import zipfile

import numpy as np
import tiktoken
from hypothesis import strategies as st

from accelerated.data.lanes import Parts
from accelerated.data.tokenizers import BpeTokenizer, ByteTokenizer
from accelerated.data.windows import Document

BYTES = ByteTokenizer()


def document_of_ids(name, ids):
    """A document that predicts each of its tokens except the first."""
    return Document(name, ids[:-1], ids[1:], np.ones(max(len(ids) - 1, 0), bool))


def documents_of(lengths):
    """Documents with recognisable tokens: document d holds 10 d + 1, 10 d + 2, ... modulo 256."""
    documents = []
    for number, length in enumerate(lengths):
        first = 10 * number + 1
        text = bytes(token % 256 for token in range(first, first + length))
        documents.append(document_of_ids(str(number), BYTES.encode(text)))
    return documents


def whole(documents):
    """The Parts of documents that are each of them, whole."""
    return Parts(documents, [(n, 0, len(each.inputs)) for n, each in enumerate(documents)])


def write(folder, texts):
    """Write {name: text or bytes} into a folder, and return it."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def rewrite(path, content):
    """Write a file anew without a trace in its times."""
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flipped_bits(content, count):
    """The bytes of a file with one bit flipped: the first, the last, and `count` random ones."""
    size = 8 * len(content)
    rng = random.Random(0)
    for bit in (0, size - 1, *(rng.randrange(size) for _ in range(count))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def as_zip(members):
    """The bytes of a zip of {name: content}."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file.getvalue()


def small_encoding():
    """An encoding of all 256 bytes and a few merges, which splits words as GPT-2 does."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in (b"th", b"the", b" the", b"an", b"\xc3\xa9"):
        ranks[token] = len(ranks)
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    return tiktoken.Encoding(
        "small",
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )


def show_ranks(tokens):
    """The contents of a file of tiktoken's ranks, for tokens in the order of their ranks."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


SINGLE_BYTES = [bytes([byte]) for byte in range(256)]
# Tokens that hold white space, only that, or several words
MERGES = [b"th", b"the", b" the", b"\n\n", b"a ", b"a b", b"\xc3\xa9", b" a b"]
RANKS = {token: rank for rank, token in enumerate([*SINGLE_BYTES, *MERGES])}
ENCODING = {"pat_str": r"(?s).+", "mergeable_ranks": RANKS, "special_tokens": {}}
MERGED = BpeTokenizer("merged", tiktoken.Encoding("merged", **ENCODING))


def document_from(text, tokenizer, scored=None):
    """A Document with read-only arrays; all of it is scored unless a mask is given."""
    ids = tokenizer.encode(text)
    ids.flags.writeable = False
    size = max(len(ids) - 1, 0)
    mask = np.array([True] if scored is None else scored)
    return Document(text, ids[:-1], ids[1:], np.resize(mask, size))


texts = st.text("theab \n\t\r\x0b\x0cé\xa0.", max_size=40)
either = st.sampled_from([BYTES, MERGED])


@st.composite
def documents_and_tokenizer(draw, least=0):
    """Documents with some tokens scored; one has at least `least` to predict."""
    tokenizer = draw(either)
    masks = st.none() | st.lists(st.booleans(), min_size=1, max_size=5)
    drawn = [draw(texts) for _ in range(draw(st.integers(0, 4)))]
    if least:
        drawn.append(draw(texts) + "x" * (least + 1))
    return [document_from(text, tokenizer, draw(masks)) for text in drawn], tokenizer


def random_nats(documents, seed):
    """Random losses in the form of token_nats: NaN if a token is not scored."""
    rng = np.random.default_rng(seed)
    nats = []
    for document in documents:
        losses = rng.exponential(3.0, len(document.inputs))
        nats.append(np.where(document.scored, losses, np.nan))
    return nats
