"""A text read by a model in the plainest way, for what reads many of them side by side."""

import numpy as np
import torch
from torch.nn import functional

from accelerated.data.windows import cut
from accelerated.protocol import detach, overlap_of


def read_alone(model, text, is_cleared=lambda index: False):
    """Yield (window, logits of its tokens (B, n, V), auxiliary losses) of a text (B, n), in order.

    The last window is padded, and its padding's logits left out. Before window i the state is the
    initial one if is_cleared(i). A graph ends with its window.
    """
    text = torch.tensor(np.asarray(text), dtype=torch.long)
    segment = model.config.segment
    windows = cut(text.shape[1] + 1, segment, overlap_of(model.config))
    for index, window in enumerate(windows):
        if index == 0 or is_cleared(index):
            state = model.initial_state(len(text))
        tokens = text[:, window.start : window.stop]
        size = tokens.shape[1]
        padded = functional.pad(tokens, (0, segment - size))
        logits, after, auxiliary = model(padded, state)
        state = detach(after)
        yield window, logits[:, :size], auxiliary
