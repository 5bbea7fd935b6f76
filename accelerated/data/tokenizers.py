"""Text to token ids and back: bytes, byte-level BPE (tiktoken's, ranks, learned), the package tokenizers' own, words; recordings.

A rank is a BPE token's id and its place in the order of merges. train.py chooses a tokenizer. It has
    vocabulary      ids are 0 .. vocabulary - 1
    dtype           NumPy's smallest type that holds them
    token_bytes     (V,) number of text bytes that each id stands for
    fingerprint     a hash that changes if an id means something else
    spells_text     whether its tokens stand for text
    encode(text)    str or bytes to an array of ids
    decode(ids)     to the same bytes that were encoded, or to the text as the tokenizer normalises it
    save(run)       write what the run folder must hold of it, if it has no name
    last_cut(text)  the last position to cut text without changing its tokens; 0 if there is none
"""

import base64
import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path
from types import ModuleType

import numpy as np
import tiktoken

from accelerated.data.config import ENCODINGS, MU_LAW, PACKAGED, RANKS, VOCABULARY, DataConfig
from accelerated.data.sources import Source, read_bytes
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import written_whole
from accelerated.program.progress import Progress

WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""  # GPT-2's; no token crosses them
AFTER_A_WORD = re.compile(r".*[^\W\d_](?=[\s。，、；：？！])", re.DOTALL)  # all ENCODINGS end a piece there
BEFORE_A_BLANK = re.compile(r".*[^\W\d_](?=[ \n])", re.DOTALL)
NOT_UTF8 = re.compile("([\udc80-\udcff])")  # a byte that is not UTF-8, as errors="surrogateescape" decodes it
LINE_END, UNKNOWN = "\n", "<unk>"  # entries of every closed vocabulary
WORD = re.compile(r"\n|\S+")
LEARNING_PIECE = 1 << 16  # bytes; the package tokenizers takes 256 pieces at a time
ADVICE = f"give a file of tiktoken ranks, a tokenizer.json, or one of {', '.join(ENCODINGS)}"


class ByteTokenizer:
    """Bytes as token ids 0..255: of text, or with the name mu-law of recordings, whose samples they are."""

    vocabulary, dtype = 256, np.uint8
    token_bytes = np.ones(256, dtype=np.int64)

    def __init__(self, name: str = "bytes"):
        self.name = self.fingerprint = name
        self.spells_text = name != MU_LAW

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to a uint8 array of ids."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> bytes:
        """Convert ids to bytes."""
        return np.asarray(ids, dtype=np.uint8).tobytes()

    def last_cut(self, text: bytes) -> int:
        """Its end: bytes can be cut anywhere."""
        return len(text)


class SpelledTokenizer:
    """Ids that each stand for a spelling; a run folder keeps the tokenizer's content in `file`."""

    spells_text = True
    file: str
    end_of_word = AFTER_A_WORD  # matches a text up to where it can be cut; None if it cannot

    def __init__(self, name: str, spellings: list[bytes], fingerprint: str, content: bytes):
        self.name, self.spellings, self.fingerprint, self.content = name, spellings, fingerprint, content
        self.vocabulary = len(spellings)
        self.dtype = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        self.token_bytes = np.array([len(text) for text in spellings])

    def decode(self, ids: np.ndarray) -> bytes:
        """Convert ids to bytes."""
        return b"".join(self.spellings[int(token)] for token in ids)

    def last_cut(self, text: bytes) -> int:
        """The end of the last whole word."""
        if not self.end_of_word:
            return 0
        match = self.end_of_word.match(text.decode(errors="surrogateescape"))
        return len(match[0].encode(errors="surrogateescape")) if match else 0

    def save(self, run: Path) -> None:
        """Write the file to a run folder."""
        with written_whole(Path(run) / self.file, "give another --out") as path:
            path.write_bytes(self.content)


class BpeTokenizer(SpelledTokenizer):
    """Byte-level BPE by a tiktoken encoding; text never becomes a special token."""

    file = RANKS

    def __init__(self, name: str, encoding: tiktoken.Encoding):
        self.encoding = encoding
        spelled = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        spelled |= {number: token.encode() for token, number in encoding._special_tokens.items()}
        spellings = [spelled.get(token, b"") for token in range(encoding.n_vocab)]  # some encodings leave ids unused
        shown = hashlib.sha256(b"\0".join(base64.b64encode(text) for text in spellings))
        fingerprint = hashlib.sha256(shown.digest() + encoding._pat_str.encode()).hexdigest()
        super().__init__(name, spellings, fingerprint, show_ranks(spellings))

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids; each byte that is not UTF-8 becomes one token."""
        text = text if isinstance(text, str) else text.decode(errors="surrogateescape")
        ids = [
            np.array([self.encoding.encode_single_token(part.encode(errors="surrogateescape"))])
            if NOT_UTF8.match(part)
            else self.encoding.encode_to_numpy(part, disallowed_special=())
            for part in NOT_UTF8.split(text)
        ]
        return np.concatenate([np.empty(0, np.int64), *ids]).astype(self.dtype)


class PackagedTokenizer(SpelledTokenizer):
    """Any tokenizer of the package tokenizers, of its .json; text never becomes a special token.

    If its tokens are bytes it keeps all text that is UTF-8, otherwise it spells the text as it normalises it.
    """

    file = PACKAGED

    def __init__(self, name: str, content: bytes):
        package = tokenizers_package("a tokenizer.json")
        try:
            self.model, described = package.Tokenizer.from_str(content.decode()), json.loads(content)
        except Exception:  # the package raises no other type
            raise ValueError("the package tokenizers cannot open it") from None
        self.model.encode_special_tokens = True
        self.model.no_padding()
        self.model.no_truncation()
        symbols = byte_of_symbol() if "'ByteLevel'" in str((described.get("pre_tokenizer"), described.get("decoder"))) else {}
        with_blanks = type(self.model.model).__name__ in ("WordPiece", "WordLevel")  # a .json may leave its model's type out
        tokens = {number: token for token, number in self.model.get_vocab().items()}
        spellings = [spelling_of(tokens.get(number, ""), symbols, with_blanks) for number in range(1 + max(tokens))]
        super().__init__(name, spellings, hashlib.sha256(content).hexdigest(), content)
        parts = ("ab", " ab", "\nab", "  ab", "\n\n ab")
        apart = [token for part in parts for token in self.encode(part)]
        within_words = not any(re.search(rb"\w\s", text) for text in spellings)
        self.end_of_word = BEFORE_A_BLANK if within_words and self.encode("".join(parts)).tolist() == apart else None

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids; bytes that are not UTF-8 are read as replacement characters."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return np.array(self.model.encode(text, add_special_tokens=False).ids, self.dtype)


def spelling_of(token: str, symbols: dict[str, int], with_blanks: bool) -> bytes:
    """The text of a token of the package tokenizers: bytes if it is written in these symbols, one byte as <0xE2>, or words."""
    if symbols.keys() >= set(token):
        return bytes(symbols[symbol] for symbol in token)
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    if with_blanks:
        return (token[2:] if token.startswith("##") else f" {token}").encode()
    return token.replace("▁", " ").replace("</w>", " ").encode()


class WordTokenizer(SpelledTokenizer):
    """The words of a closed vocabulary: what stands between white space, and each line's end. All other words are <unk>.

    White space is not kept: every word is spelled with one blank before it, as WikiText's files have it.
    """

    file = VOCABULARY

    def __init__(self, name: str, words: list[str]):
        content = "".join(word.strip(LINE_END) + "\n" for word in words).encode()  # an entry a line; the line's end is empty
        super().__init__(name, [b" " + word.encode() for word in words], hashlib.sha256(content).hexdigest(), content)
        self.words, self.ids = words, {word: number for number, word in enumerate(words)}

    def encode(self, text: str | bytes) -> np.ndarray:
        """Convert text to an array of ids; a word with bytes that are not UTF-8 is unknown."""
        text = text if isinstance(text, str) else text.decode(errors="surrogateescape")
        unknown = self.ids[UNKNOWN]
        return np.array([self.ids.get(word, unknown) for word in WORD.findall(text)], self.dtype)

    def last_cut(self, text: bytes) -> int:
        """After the last line's end or blank."""
        return max(text.rfind(b"\n"), text.rfind(b" ")) + 1


def read_words(content: bytes) -> list[str]:
    """The entries of a vocabulary's file; raises ValueError if it is none."""
    words = [line or LINE_END for line in content.decode().split("\n")[:-1]]
    if len(set(words)) < len(words) or not {LINE_END, UNKNOWN} <= set(words):
        raise ValueError("it is no vocabulary of words")
    return words


def show_ranks(tokens: list[bytes]) -> bytes:
    """The contents of a ranks file, for tokens in the order of their ranks."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def read_ranks(content: bytes) -> dict[bytes, int]:
    """The {token: rank} of a ranks file's contents; raises ValueError if it is none.

    (tiktoken's own reader keeps a copy of a file by its path, and would read that when the file has changed.)
    """
    pairs = [line.split() for line in content.splitlines() if line]
    try:
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError:
        raise ValueError("it is no list of tokens in base64, each with its rank") from None
    if sorted(ranks.values()) != list(range(len(pairs))) or not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise ValueError("its tokens lack one of the 256 bytes, or their ranks are not 0, 1, 2 ..., each once")
    return ranks


def tokenizer_of_ranks(name: str, ranks: dict[bytes, int]) -> BpeTokenizer:
    """The tokenizer of {token: rank}; it cuts text into words as GPT-2 does."""
    return BpeTokenizer(name, tiktoken.Encoding("ranks", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={}))


def of_vocabulary_and_merges(path: Path, merges: Path) -> bytes:
    """The tokenizer.json of a byte-level BPE in two files, as GPT-2 and RoBERTa have them; raises ValueError if they are none."""
    package = tokenizers_package("a vocab.json")
    try:
        return package.ByteLevelBPETokenizer(str(path), str(merges), add_prefix_space=False).to_str().encode()
    except Exception as error:  # the package raises no other type
        raise ValueError(f"with {merges.name} it is no byte-level BPE ({error})") from None


def tokenizer_of_file(path: str | Path, advice: str = ADVICE) -> SpelledTokenizer:
    """The tokenizer of a file: a .json of the package tokenizers, a vocab.json with its merges.txt, .words, or else ranks."""
    path = Path(path)
    try:
        content = path.read_bytes()
        if path.name == "vocab.json" and (merges := path.with_name("merges.txt")).exists():
            content = of_vocabulary_and_merges(path, merges)
        if path.suffix == ".json":
            return PackagedTokenizer(str(path), content)
        if path.suffix == ".words":
            return WordTokenizer(str(path), read_words(content))
        return tokenizer_of_ranks(str(path), read_ranks(content))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {advice}") from None
    except ValueError as error:
        raise InputError(f"{path} cannot be used: {error}; {advice}") from None


def open_tokenizer(name: str) -> ByteTokenizer | SpelledTokenizer:
    """The tokenizer that --tokenizer names: one of ENCODINGS, or a file."""
    try:
        if name in ("bytes", MU_LAW):
            return ByteTokenizer(name)
        return BpeTokenizer(name, tiktoken.get_encoding(name)) if name in ENCODINGS else tokenizer_of_file(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--tokenizer {name}: tiktoken cannot fetch its files ({error}); fetch them on a machine with a network, and set "
            "TIKTOKEN_CACHE_DIR to a copy of its folder"
        ) from None


def run_tokenizer(run: Path, data: DataConfig) -> ByteTokenizer | SpelledTokenizer:
    """The tokenizer of a run folder with this DataConfig; raises InputError unless its file is as it was saved."""
    if not data.tokenizer_file:
        return open_tokenizer(data.tokenizer)
    path, advice = Path(run) / data.tokenizer_file, "it is damaged or missing; restore it from a copy of the run"
    opened = tokenizer_of_file(path, advice)
    if path.read_bytes() != opened.content:
        raise InputError(f"{path} is not as it was written; {advice}")
    return opened


def byte_of_symbol() -> dict[str, int]:
    """Return {character: byte} for the alphabet in which `tokenizers` writes bytes; it is GPT-2's.

    Printable Latin-1 characters stand for their own bytes; characters from 256 on stand for the other bytes, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def tokenizers_package(what: str = "--train-bpe") -> ModuleType:
    """The package `tokenizers`; raises InputError, which says what needs it, if it is not installed."""
    return optional_package("tokenizers", f"{what} needs", "bpe")


def texts_to_learn(source: Source) -> Iterator[Iterator[str]]:
    """Of each text of the training split its pieces, without bytes that are not UTF-8."""
    texts = (text for split, text in source.texts() if split == "train")
    return (codecs.iterdecode(read_bytes(text, LEARNING_PIECE), "utf-8", "ignore") for text in texts)


def learn_ranks(pieces: Iterable[str], vocabulary: int) -> dict[bytes, int]:
    """Learn a byte-level BPE with `vocabulary` tokens from pieces of text; returns {token: rank}.

    The 256 bytes come first, then the merged tokens in the order of their merges. Raises InputError if the text has too few
    different words.
    """
    symbols, model = byte_of_symbol(), tokenizers_package().ByteLevelBPETokenizer()
    model.train_from_iterator(pieces, vocabulary, min_frequency=0, show_progress=False)
    written = sorted(model.get_vocab(), key=model.token_to_id)
    merged = [bytes(symbols[symbol] for symbol in token) for token in written if len(token) > 1]
    if 256 + len(merged) < vocabulary:
        raise InputError(
            f"--train-bpe {vocabulary}: the training split has words for only {256 + len(merged)} tokens; give at most that"
        )
    return {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + merged)}


def train_bpe(source: Source, vocabulary: int) -> BpeTokenizer:
    """Learn a tokenizer of `vocabulary` tokens from a source's training split."""
    pieces = chain.from_iterable(texts_to_learn(source))
    learned = ThreadPoolExecutor(1).submit(learn_ranks, pieces, vocabulary)  # it would keep Ctrl-C from the thread that calls it
    with Progress(f"learning {vocabulary:,} tokens") as bar:  # the package does not say how far it is
        bar.bar_format = "{desc}, {elapsed} so far"
        while not learned.done():
            wait([learned], 0.1)
            bar.update(0)
    return tokenizer_of_ranks("bpe", learned.result())


def train_words(source: Source, vocabulary: int) -> WordTokenizer:
    """Count a closed vocabulary in a source's training split."""
    counts = Counter()
    with Progress(f"counting words for {vocabulary:,} tokens", unit="B") as bar:
        for pieces in texts_to_learn(source):
            cut_off = ""  # the word that a piece's end cuts off
            for piece in chain(pieces, [" "]):
                bar.update(len(piece))
                string = cut_off + piece
                end = max(string.rfind(" "), string.rfind("\n")) + 1
                counts.update(WORD.findall(string[:end]))
                cut_off = string[end:]
    return WordTokenizer("words", most_frequent(counts, vocabulary))


def most_frequent(counts: Counter, vocabulary: int) -> list[str]:
    """The entries of a closed vocabulary, most frequent first, as adaptive softmax needs them; equally frequent ones by spelling.

    <unk> is counted with the words that are left out. Raises InputError if there are too few different words.
    """
    words = sorted(counts.keys() - {LINE_END, UNKNOWN}, key=lambda word: (-counts[word], word))
    if len(words) + 2 < vocabulary:
        raise InputError(
            f"--train-words {vocabulary}: the training split has {len(words)} words, {len(words) + 2} with the line's end and "
            f"{UNKNOWN}; give at most that"
        )
    kept, others = words[: vocabulary - 2], words[vocabulary - 2 :]
    counts = counts + Counter({UNKNOWN: sum(counts[word] for word in others)})
    return sorted([LINE_END, UNKNOWN, *kept], key=lambda word: (-counts[word], word))
