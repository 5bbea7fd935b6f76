"""Text to token ids and back: bytes, byte-level BPE (tiktoken's, ranks, learned), the package tokenizers' own, words; recordings.

A rank is a BPE token's id and its place in the order of merges. train.py chooses a tokenizer. Whoever
only names the type Tokenizer imports neither torch nor tiktoken with it.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import hashlib
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, SupportsInt

import numpy as np

from accelerated.data.config import ENCODINGS, MU_LAW, DataConfig
from accelerated.data.sources import Source, Text
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import written_whole

if TYPE_CHECKING:
    import tiktoken

GPT2_PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""  # no token crosses them
LINE_END, UNKNOWN = "\n", "<unk>"  # in every closed vocabulary; <unk> stands for all other words
WORD = r"\n|\S+"
LEARNING_PIECE = 1 << 16  # bytes; the package tokenizers takes 256 pieces at a time
ADVICE = f"give a file of tiktoken ranks, a tokenizer.json, or one of {', '.join(ENCODINGS)}"
OFFLINE = "fetch its files on a machine with a network, and set TIKTOKEN_CACHE_DIR to a copy of its folder"
DAMAGED = "it is damaged or missing; restore it from a copy of the run"


class Tokenizer(ABC):
    """Token ids that each stand for a spelling."""

    name: str  # what --tokenizer calls it, or the file it was read from
    vocabulary: int  # V; ids are 0 .. V - 1
    dtype: type[np.unsignedinteger]  # the smallest that holds them
    spellings: list[bytes]  # V of them
    token_bytes: np.ndarray  # (V,) bytes of text that each id stands for
    fingerprint: str  # a hash that changes if an id means something else
    content: bytes  # what a run folder keeps of a tokenizer without a name
    spells_text: bool = True  # whether its tokens stand for text

    def __init__(self, name: str, spellings: list[bytes], fingerprint: str, content: bytes = b""):
        self.name = name
        self.vocabulary = len(spellings)
        self.dtype = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        self.spellings = spellings
        self.token_bytes = np.array([len(spelling) for spelling in spellings])
        self.fingerprint = fingerprint
        self.content = content

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self.vocabulary:,} tokens)"

    @abstractmethod
    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids (n,)."""

    def decode(self, ids: Iterable[SupportsInt]) -> bytes:
        """Convert ids, numbers or one-element tensors, to the text that was encoded.

        A tokenizer that normalises text returns it as normalised.
        """
        return b"".join(self.spellings[int(token)] for token in ids)

    def save(self, path: Path) -> None:
        """Write the content to a file of a run folder, whose name DataConfig.tokenizer_file says."""
        with written_whole(path, "give another --out") as temporary:
            temporary.write_bytes(self.content)


class ByteTokenizer(Tokenizer):
    """Bytes as token ids 0..255: of text, or with the name mu-law of recordings, whose samples they are."""

    def __init__(self, name: str = "bytes"):
        super().__init__(name, [bytes([byte]) for byte in range(256)], name)
        self.spells_text, self.dtype = name != MU_LAW, np.uint8

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to a uint8 array of ids."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)


class BpeTokenizer(Tokenizer):
    """Byte-level BPE by a tiktoken encoding; text never becomes a special token."""

    def __init__(self, name: str, encoding: tiktoken.Encoding):
        self.encoding = encoding
        spelled = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        spelled |= {number: token.encode() for token, number in encoding._special_tokens.items()}
        spellings = [
            spelled.get(token, b"") for token in range(encoding.n_vocab)
        ]  # some encodings leave ids unused
        shown = [base64.b64encode(text) for text in spellings]
        fingerprint = hashlib.sha256(
            hashlib.sha256(b"\0".join(shown)).digest() + encoding._pat_str.encode()
        ).hexdigest()
        super().__init__(
            name,
            spellings,
            fingerprint,
            b"".join(b"%b %d\n" % line for line in zip(shown, count())),
        )

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids; bytes that are not UTF-8 are read as replacement characters."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)


class PackagedTokenizer(Tokenizer):
    """Any tokenizer of the package tokenizers, of its .json; text never becomes a special token.

    If its tokens are bytes it keeps all text that is UTF-8, otherwise it spells the text as it normalises it.
    """

    def __init__(self, name: str, content: bytes):
        self.model = tokenizers_package("a tokenizer.json").Tokenizer.from_str(content.decode())
        self.model.encode("\ue000")  # raises if the model needs an unknown token and has none
        self.model.encode_special_tokens = True
        self.model.no_padding()
        self.model.no_truncation()
        symbols = (
            byte_of_symbol()
            if "ByteLevel(" in f"{self.model.pre_tokenizer} {self.model.decoder}"
            else {}
        )
        self.kind, tokens = (
            type(self.model.model).__name__,
            {number: token for token, number in self.model.get_vocab().items()},
        )
        spellings = [
            spelling_of(tokens[i], symbols, self.kind) if i in tokens else b""
            for i in range(1 + max(tokens))
        ]
        super().__init__(name, spellings, hashlib.sha256(content).hexdigest(), content)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids; bytes that are not UTF-8 are read as replacement characters."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        parts = (
            text.splitlines(keepends=True) if self.kind == "WordLevel" else [text]
        )  # words cross no line end; it is faster
        ids = [
            number
            for part in parts
            for number in self.model.encode(part, add_special_tokens=False).ids
        ]
        return np.array(ids, self.dtype)


def spelling_of(token: str, symbols: dict[str, int], kind: str) -> bytes:
    """The text of a token of this kind of model: a word with a blank, bytes in these symbols, one byte as <0xE2>, or text."""
    if kind == "WordLevel" or (kind == "WordPiece" and not token.startswith("##")):
        return f" {token}".encode()
    if kind == "WordPiece":
        return token[2:].encode()
    if symbols.keys() >= set(token):
        return bytes(symbols[symbol] for symbol in token)
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").replace("</w>", " ").encode()


def read_ranks(content: bytes) -> dict[bytes, int]:
    """The {token: rank} of a ranks file's contents; raises ValueError if it is none.

    (tiktoken's own reader keeps a copy of a file by its path, and would read that when the file has changed.)
    """
    pairs = [line.split() for line in content.splitlines() if line]
    with contextlib.suppress(ValueError):
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        if (
            sorted(ranks.values()) == list(range(len(pairs)))
            and {bytes([byte]) for byte in range(256)} <= ranks.keys()
        ):
            return ranks
    raise ValueError(
        "it is no list of tokens in base64, all 256 bytes among them, with ranks 0, 1, 2 ..., each once"
    )


def tokenizer_of_ranks(name: str, ranks: dict[bytes, int]) -> BpeTokenizer:
    """The tokenizer of {token: rank}; it cuts text into words as GPT-2 does."""
    import tiktoken

    return BpeTokenizer(
        name,
        tiktoken.Encoding("ranks", pat_str=GPT2_PIECES, mergeable_ranks=ranks, special_tokens={}),
    )


def tokenizer_of_file(path: str | Path, advice: str = ADVICE) -> Tokenizer:
    """The tokenizer of a file: a .json of the package tokenizers, a vocab.json with its merges.txt, or else ranks."""
    name, merges = str(path), Path(path).parent / "merges.txt"
    try:
        content = Path(path).read_bytes()
        if Path(path).name == "vocab.json" and merges.exists():  # as GPT-2 and RoBERTa have them
            package = tokenizers_package("a vocab.json")
            content = (
                package.ByteLevelBPETokenizer(name, str(merges), add_prefix_space=False)
                .to_str()
                .encode()
            )
        if name.endswith(".json"):
            return PackagedTokenizer(name, content)
        return tokenizer_of_ranks(name, read_ranks(content))
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {advice}") from None
    except Exception as error:  # the package tokenizers raises no other type
        raise InputError(f"{path} cannot be used: {error}; {advice}") from None


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that --tokenizer names: one of ENCODINGS, or a file."""
    if name in ("bytes", MU_LAW):
        return ByteTokenizer(name)
    if name not in ENCODINGS:
        return tokenizer_of_file(name)
    import tiktoken

    try:
        return BpeTokenizer(name, tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--tokenizer {name}: tiktoken cannot fetch it ({error}); {OFFLINE}"
        ) from None


def run_tokenizer(run: Path, data: DataConfig) -> Tokenizer:
    """The tokenizer of a run folder with this DataConfig; its fingerprint shows whether it is the one that was saved.

    Of a GPT-2, a folder or the file in it, the tokenizer is the file that the DataConfig names.
    """
    folder = Path(run).absolute().parent if Path(run).is_file() else Path(run).absolute()
    own = folder / data.tokenizer_file
    if not own.exists() and Path(data.tokenizer).parent == folder:
        own = Path(data.tokenizer)
    return (
        tokenizer_of_file(own, DAMAGED) if data.tokenizer_file else open_tokenizer(data.tokenizer)
    )


def tokenizers_package(what: str = "--train-bpe") -> ModuleType:
    """The package `tokenizers`; raises InputError, which says what needs it, if it is not installed."""
    return optional_package("tokenizers", f"{what} needs", "bpe")


def byte_of_symbol() -> dict[str, int]:
    """Return {character: byte} for the alphabet in which `tokenizers` writes bytes; it is GPT-2's.

    Printable Latin-1 characters stand for their own bytes; characters from 256 on stand for the other bytes, in order.
    """
    symbols = sorted(tokenizers_package().pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted({*range(256)} - {*map(ord, symbols)}))
    return {symbol: ord(symbol) if ord(symbol) < 256 else next(others) for symbol in symbols}


def learn_ranks(pieces: Iterable[str], vocabulary: int) -> dict[bytes, int]:
    """Learn a byte-level BPE with `vocabulary` tokens from pieces of text; returns {token: rank}.

    The 256 bytes come first, then the merged tokens in the order of their merges. Raises InputError if the text has too few
    different words.
    """
    symbols, model = byte_of_symbol(), tokenizers_package().ByteLevelBPETokenizer()
    model.train_from_iterator(pieces, vocabulary, min_frequency=0, show_progress=False)
    written = sorted(model.get_vocab(), key=model.token_to_id)
    merged = [bytes(symbols[symbol] for symbol in token) for token in written if len(token) > 1]
    check_learned("--train-bpe", vocabulary, 256 + len(merged))
    return {
        token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *merged])
    }


def cut_up(text: Text) -> Iterator[bytes]:
    """The text, at most LEARNING_PIECE bytes at a time."""
    for part in text.parts:
        content = part()
        yield from (
            content[start : start + LEARNING_PIECE]
            for start in range(0, len(content), LEARNING_PIECE)
        )


def train_bpe(source: Source, vocabulary: int) -> BpeTokenizer:
    """Learn a tokenizer of `vocabulary` tokens from a source's training split, without bytes that are not UTF-8."""
    texts = (cut_up(text) for split, text in source.texts() if split == "train")
    pieces = (piece for text in texts for piece in codecs.iterdecode(text, "utf-8", "ignore"))
    print(
        f"learning {vocabulary:,} tokens", file=sys.stderr
    )  # the package does not say how far it is
    learned = ThreadPoolExecutor(1).submit(
        learn_ranks, pieces, vocabulary
    )  # it would keep Ctrl-C from the thread that calls it
    return tokenizer_of_ranks("bpe", learned.result())


def train_words(source: Source, vocabulary: int) -> PackagedTokenizer:
    """Count a closed vocabulary in a source's training split: most frequent first, as adaptive softmax needs them.

    Equally frequent words are in the order of their spelling; <unk> is counted with the words that are left out. White space is
    not kept: every word is spelled with one blank before it, as WikiText's files have it. Raises InputError if there are too few
    different words.
    """
    package, counts = tokenizers_package("--train-words"), Counter()
    for text in (text for split, text in source.texts() if split == "train"):
        counts.update(re.findall(WORD, text.read().decode(errors="ignore")))
    words = sorted(counts.keys() - {LINE_END, UNKNOWN}, key=lambda word: (-counts[word], word))
    check_learned("--train-words", vocabulary, len(words) + 2)
    counts[UNKNOWN] += sum(counts[word] for word in words[vocabulary - 2 :])
    kept = sorted(
        [LINE_END, UNKNOWN, *words[: vocabulary - 2]], key=lambda word: (-counts[word], word)
    )
    model = package.Tokenizer(
        package.models.WordLevel({word: number for number, word in enumerate(kept)}, UNKNOWN)
    )
    model.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(WORD), "removed", invert=True)
    return PackagedTokenizer("words", model.to_str().encode())


def check_learned(option: str, vocabulary: int, possible: int) -> None:
    """Raise InputError if a vocabulary is larger than what the training split has."""
    if possible < vocabulary:
        raise InputError(
            f"{option} {vocabulary}: the training split has only {possible} different tokens; give at most that"
        )
