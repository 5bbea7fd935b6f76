"""Text to token ids and back: bytes, or byte-level BPE by tiktoken. Any bytes survive the round trip.

A tokenizer has
    vocabulary      ids are 0 .. vocabulary - 1
    dtype           NumPy's smallest type that holds them
    token_bytes     (V,) bytes of text that each id spells
    fingerprint     what changes when its ids mean something else
    encode(text)    str or bytes to an array of ids
    decode(ids)     to bytes
    last_cut(text)  the last place at which text may be cut so that its parts have the tokens of the whole; 0 where none is seen
"""

import base64
import binascii
import difflib
import hashlib
import re
from pathlib import Path

import numpy as np
import tiktoken

from accelerated.data.sources import read_bytes
from accelerated.errors import InputError, disk_errors

GPT2_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # tiktoken names its copies by this
GPT2_FILES = ("vocab.bpe", "encoder.json")
RANKS_ADDRESS = "https://openaipublic.blob.core.windows.net/encodings/"
ENCODINGS = {  # tiktoken's, with the ids that each has
    "gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "p50k_edit": 50284, "cl100k_base": 100277, "o200k_base": 200019,
    "o200k_harmony": 201088,
}  # fmt: skip
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""  # GPT-2's; no token crosses them
AFTER_A_WORD = re.compile(r".*[^\W\d_](?=[\s。，、；：？！])", re.DOTALL)  # where each of ENCODINGS ends a piece
LONGEST_PIECE = 8 << 20  # bytes; text without such a place is cut anywhere after as many


class ByteTokenizer:
    """UTF-8 bytes as token ids 0..255; any bytes survive the round trip."""

    name = "bytes"
    vocabulary = 256
    dtype = np.uint8
    fingerprint = "bytes"
    token_bytes = np.ones(256, dtype=np.int64)  # bytes of text that each id spells

    def encode(self, text):
        """text, str or bytes, to a uint8 array of ids."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, ids):
        """ids to bytes."""
        return np.asarray(ids, dtype=np.uint8).tobytes()

    def last_cut(self, text):
        """Anywhere but within a character."""
        return whole_characters(text)


def whole_characters(text):
    """Bytes of text before a UTF-8 character that its end cuts off; all where it ends otherwise."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # a character's first byte, which says how many follow
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return len(text) - back if length > back else len(text)
    return len(text)


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


class BpeTokenizer:
    """Byte-level BPE by tiktoken, of any of its encodings; text is never one of its special tokens."""

    def __init__(self, name, encoding):
        self.name, self.encoding, self.vocabulary = name, encoding, encoding.n_vocab
        self.dtype = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        self.spellings = [self._spelling(token) for token in range(self.vocabulary)]
        self.token_bytes = np.array([len(text) for text in self.spellings])
        spelled = hashlib.sha256(b"\0".join(base64.b64encode(text) for text in self.spellings))
        self.fingerprint = hashlib.sha256(spelled.digest() + encoding._pat_str.encode()).hexdigest()

    def _spelling(self, token):
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # some encodings leave ids free between their words and their special tokens
            return b""

    def encode(self, text):
        """text, str or bytes, to an array of ids; bytes that are no UTF-8 become a token each."""
        parts = decodable_parts(text.encode() if isinstance(text, str) else text)
        ids = [
            self.encoding.encode_to_numpy(part.decode(), disallowed_special=())
            if decodable
            else np.array([self.encoding.encode_single_token(part)])
            for part, decodable in parts
        ]
        return np.concatenate([np.empty(0, np.int64), *ids]).astype(self.dtype)

    def decode(self, ids):
        """ids to bytes."""
        return b"".join(self.spellings[int(token)] for token in ids)

    def last_cut(self, text):
        """After a word, where tiktoken starts a new piece whatever stands before."""
        known = text[: whole_characters(text)].decode(errors="surrogateescape")
        if ends := AFTER_A_WORD.match(known):
            return len(known[: ends.end()].encode(errors="surrogateescape"))
        return whole_characters(text) if len(text) >= LONGEST_PIECE else 0


def load_encoding(name):
    """tiktoken's encoding of that name; InputError says how to give it a local copy."""
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        old = name == "gpt2"
        addresses = [GPT2_ADDRESS + file for file in GPT2_FILES] if old else [f"{RANKS_ADDRESS}{ranks_file(name)}"]
        copies = " and ".join(f"{address} as {hashlib.sha1(address.encode()).hexdigest()}" for address in addresses)
        raise InputError(
            f"--tokenizer {name}: tiktoken cannot fetch its files ({type(error).__name__}); put copies of {copies} in a folder "
            f"and set TIKTOKEN_CACHE_DIR to that folder"
        ) from None


def ranks_file(name):
    """The file that OpenAI keeps an encoding's ranks in: several share one."""
    shared = {"p50k_edit": "p50k_base", "o200k_harmony": "o200k_base"}
    return f"{shared.get(name, name)}.tiktoken"


def parse_ranks(text, path):
    """{token: rank} of a ranks file's bytes, a line for each token: base64, a space, its rank; InputError where it is none."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise InputError(
                f"--tokenizer {path}, line {number}: not a token in base64 and its rank; give a tiktoken file"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise InputError(f"--tokenizer {path}: the ranks of its {len(ranks)} tokens are not 0..{len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise InputError(f"--tokenizer {path} has no token for byte {missing[0]}; a byte-level BPE has all 256")
    return ranks


def show_ranks(ranks):
    """The bytes of a ranks file."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
    return b"".join(lines)


def tokenizer_of_ranks(name, ranks):
    """The tokenizer of {token: rank}; text is cut into words as GPT-2 does."""
    return BpeTokenizer(name, tiktoken.Encoding("ranks", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={}))


def tokenizer_of_file(path):
    """The tokenizer of a ranks file."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        names = ("bytes", *ENCODINGS)
        nearest = difflib.get_close_matches(str(path), names, n=1, cutoff=0.0)[0]
        raise InputError(
            f"cannot read --tokenizer {path}: {error.strerror}; give a file of ranks or one of {', '.join(names)} "
            f"(nearest: {nearest})"
        ) from None
    return tokenizer_of_ranks(str(path), parse_ranks(text, path))


def open_tokenizer(name):
    """The tokenizer of --tokenizer: bytes, one of ENCODINGS, or a ranks file."""
    if name == "bytes":
        return ByteTokenizer()
    return BpeTokenizer(name, load_encoding(name)) if name in ENCODINGS else tokenizer_of_file(name)


def ranks_path(run):
    """The ranks that a run folder keeps of a tokenizer that has no name."""
    return Path(run) / "tokenizer.tiktoken"


def run_tokenizer(run, data):
    """The tokenizer of a run folder, by its DataConfig."""
    return tokenizer_of_file(ranks_path(run)) if data.own_ranks else open_tokenizer(data.tokenizer)


def save_ranks(run, tokenizer):
    """Keep a BPE's ranks in a run folder."""
    path = ranks_path(run)
    temporary = path.with_suffix(".writing")
    with disk_errors(path, "give another --out"):
        temporary.write_bytes(show_ranks(dict(zip(tokenizer.spellings, range(tokenizer.vocabulary), strict=True))))
        temporary.replace(path)


def vocabulary_of(name):
    """How many ids --tokenizer has, without fetching an encoding."""
    return 256 if name == "bytes" else ENCODINGS.get(name) or tokenizer_of_file(name).vocabulary


def byte_of_symbol():
    """{character: byte} of the alphabet in which GPT-2 and `tokenizers` write bytes.

    Printable characters of Latin-1 stand for themselves, the other bytes in order for characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def check_package():
    """The `tokenizers` package; InputError where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise InputError("--train-bpe needs the package tokenizers; install the extra: pip install -e '.[bpe]'") from None
    return tokenizers


def learn_ranks(pieces, vocabulary):
    """{token: rank} of a byte-level BPE with `vocabulary` tokens, from texts, an iterable of str.

    The 256 bytes come first, then the tokens in the order in which they were merged. Raises InputError where the texts have too
    few different words for so many.
    """
    tokenizers = check_package()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    symbols = byte_of_symbol()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=list(symbols), special_tokens=[], show_progress=False
    )
    model.train_from_iterator(pieces, trainer)
    by_id = sorted(model.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(symbols[symbol] for symbol in token) for token, _ in by_id]
    merged = [token for token in tokens if len(token) > 1]
    if 256 + len(merged) < vocabulary:
        raise InputError(
            f"--train-bpe {vocabulary}: the training split has words for {256 + len(merged)} tokens; give that or fewer"
        )
    return {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + merged)}


def training_pieces(texts):
    """The training split's texts in pieces, as str; bytes that are no UTF-8 are left out."""
    for split, text in texts:
        if split == "train":
            for piece in read_bytes(text):
                yield piece.decode(errors="ignore")


def train_bpe(source, vocabulary, workspace):
    """The tokenizer of `vocabulary` tokens that a source's training split teaches."""
    return tokenizer_of_ranks("bpe", learn_ranks(training_pieces(source.texts(workspace)), vocabulary))
