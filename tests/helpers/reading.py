"""A text read by a model in the plainest way, and a run that eval.py could have opened."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional

from accelerated.attention.heads import at_least_float32
from accelerated.data.windows import cut
from accelerated.evaluation.score import TrainedRun
from accelerated.generation.any_model import Stream, stepper_of
from accelerated.memory_replay import detach
from accelerated.protocol import computing_in, overlap_of
from tests.helpers.comparison import named
from tests.helpers.texts import BYTES, whole
from tests.helpers.variants import PAPERS, variant

STEPS = 32  # tokens of which `computed` reads one by one


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


def read_on(model, tokens, stream):
    """(logits (B, n, V), streams after each token) of tokens (B, n), n >= 1, read one by one.

    The first is read after a State or a Stream.
    """
    stepper = stepper_of(model)
    if not isinstance(stream, Stream):
        stream = stepper.start(stream)
    logits = []
    streams = []
    for token in tokens.unbind(1):
        found, stream = stepper.step(token, stream)
        logits.append(found)
        streams.append(stream)
    return torch.stack(logits, 1), streams


def computed(model, tokens, kind):
    """What a model computes of the second of two segments (2, B, N), in a type, on any device.

    ({name: logits, losses, state and generation}, {name: gradient}), all in float64 on the CPU.
    """
    with computing_in(model, kind):
        begun = model.initial_state(tokens.shape[1])
        first = model(tokens[0], begun)
        second = model(tokens[1], first.state)
        logits = at_least_float32(second.logits).flatten(0, 1)
        loss = functional.cross_entropy(logits, tokens[1].flatten())
        (loss + sum(second.auxiliary.values())).backward()
        advanced = model.advance(tokens[0], detach(begun))
        generated, _ = read_on(model, tokens[1, :, :STEPS], detach(advanced))

    found = {"logits": second.logits, "generation": generated} | second.auxiliary
    found |= named("state", second.state)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [
        {name: tensor.detach().double().cpu() for name, tensor in rows.items()}
        for rows in (found, gradients)
    ]


def trained_run(paper, name, documents, tokenizer=BYTES, **changes):
    """A TrainedRun of a variant with random weights, in two lanes; `valid` has the documents."""
    config = dataclasses.replace(variant(paper, name), vocabulary=len(tokenizer.token_bytes))
    model = PAPERS[paper].random_model(config)
    settings = SimpleNamespace(model=paper, model_config=config)
    splits = {"valid": whole(documents)}
    run = TrainedRun("runs/some", model, settings, {"step": 7}, tokenizer, 2, "some data", splits)
    return run._replace(**changes)
