"""A text read by a model in the plainest way, and a run that eval.py could have opened."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional

from accelerated.data.windows import cut
from accelerated.evaluation.score import TrainedRun
from accelerated.memory_replay import detach
from accelerated.protocol import overlap_of
from tests.helpers.texts import BYTES, whole
from tests.helpers.variants import PAPERS, variant


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


def trained_run(paper, name, documents, tokenizer=BYTES, **changes):
    """A TrainedRun of a variant with random weights, in two lanes; `valid` has the documents."""
    config = dataclasses.replace(variant(paper, name), vocabulary=len(tokenizer.token_bytes))
    model = PAPERS[paper].random_model(config)
    settings = SimpleNamespace(model=paper, model_config=config)
    splits = {"valid": whole(documents)}
    run = TrainedRun("runs/some", model, settings, {"step": 7}, tokenizer, 2, "some data", splits)
    return run._replace(**changes)
