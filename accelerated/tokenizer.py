"""Text to token ids and back."""

import numpy as np


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


TOKENIZERS = {ByteTokenizer.name: ByteTokenizer}
