"""Text to token ids and back."""

import hashlib

import numpy as np
import tiktoken

from accelerated.errors import InputError

GPT2_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # tiktoken names its copies by this
GPT2_FILES = ("vocab.bpe", "encoder.json")


class ByteTokenizer:
    """UTF-8 bytes as token ids 0..255; any bytes survive the round trip."""

    name = "bytes"
    vocabulary = 256
    token_bytes = np.ones(256, dtype=np.int64)  # bytes of text that each id spells

    def encode(self, text):
        """text, str or bytes, to a uint8 array of ids."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids):
        """ids to bytes."""
        return np.asarray(ids, dtype=np.uint8).tobytes()


def decodable_parts(text):
    """Bytes cut into (part, whether it is UTF-8): as much of it as possible at a time, other bytes one by one."""
    while text:
        try:
            text.decode()
            yield text, True
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield text[: error.start], True
            yield text[error.start : error.start + 1], False
            text = text[error.start + 1 :]


class Gpt2Tokenizer:
    """tiktoken's encoding of GPT-2: byte-level BPE of 50,257 tokens; any bytes survive the round trip.

    Raises InputError where tiktoken has no copy of its files and cannot fetch them.
    """

    name = "gpt2"
    vocabulary = 50257

    def __init__(self):
        self.encoding = load_encoding(self.name)
        spelled = (self.encoding.decode_single_token_bytes(token) for token in range(self.encoding.n_vocab))
        self.token_bytes = np.array([len(text) for text in spelled])

    def encode(self, text):
        """text, str or bytes, to a uint16 array of ids; bytes that are no UTF-8 become a token each."""
        ids = []
        for part, decodable in decodable_parts(text.encode() if isinstance(text, str) else text):
            ids += self.encoding.encode_ordinary(part.decode()) if decodable else [self.encoding.encode_single_token(part)]
        return np.array(ids, dtype=np.uint16)

    def decode(self, ids):
        """ids to bytes."""
        return self.encoding.decode_bytes([int(token) for token in ids])


def load_encoding(name):
    """tiktoken's encoding of that name; InputError says how to give it a local copy."""
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        copies = " and ".join(f"{file} as {hashlib.sha1((GPT2_ADDRESS + file).encode()).hexdigest()}" for file in GPT2_FILES)
        raise InputError(
            f"--tokenizer {name}: tiktoken cannot fetch its files ({type(error).__name__}); put copies of {copies} in a folder "
            f"(they are at {GPT2_ADDRESS}) and set TIKTOKEN_CACHE_DIR to that folder"
        ) from None


TOKENIZERS = {tokenizer.name: tokenizer for tokenizer in (ByteTokenizer, Gpt2Tokenizer)}
