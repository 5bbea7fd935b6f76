"""Learning a byte-level BPE from a training split. The package `tokenizers` learns; tiktoken encodes."""

from accelerated.errors import InputError
from accelerated.texts import read_bytes
from accelerated.tokenizer import tokenizer_of_ranks


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
