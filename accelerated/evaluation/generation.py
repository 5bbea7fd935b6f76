"""Continuing a text token by token, with the state carried over any length."""

import codecs
import contextlib
from typing import NamedTuple

import torch
from torch.nn import functional

from accelerated.data.windows import overlap_of


class Sampling(NamedTuple):
    """How the next token is drawn: from softmax(logits / temperature), of its top k tokens, of their nucleus."""

    temperature: float = 1.0  # at 0 the most probable token is taken, whatever the others say
    top_k: int = 0  # how many of the most probable tokens; 0 for all
    top_p: float = 1.0  # what the nucleus's probabilities add up to; 1 for all


WHOLE_SOFTMAX = Sampling()
GREEDY = Sampling(temperature=0.0)


@torch.no_grad()
def read_prompt(model, prompt):
    """Read prompt (B, n), n >= 1, from a document's start; returns the logits after it (B, V) and the state.

    Whole segments go through `advance`, the rest token by token.
    """
    length, segment = prompt.shape[1], model.config.segment
    state, at = model.initial_state(len(prompt)), 0
    while length - at > segment:
        state = model.advance(prompt[:, at : at + segment], state)
        at += segment - overlap_of(model.config)
    for token in prompt[:, at:].unbind(1):
        logits, state = model.step(token, state)
    return logits, state


def most_probable(probabilities, count):
    """The `count` most probable tokens of each row of probabilities (B, V), the others at 0; not normalised again."""
    values, tokens = probabilities.topk(count, -1)  # (B, k)
    return torch.zeros_like(probabilities).scatter_(-1, tokens, values)


def nucleus(probabilities, mass):
    """The fewest most probable tokens of each row of probabilities (B, V) that hold `mass` of its sum, the others at 0.

    One token at least (Holtzman et al. 2019; the samples of Compressive Transformers, appendix E, have mass 0.98).
    """
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    before = functional.pad(ordered.cumsum(-1)[:, :-1], (1, 0))  # what more probable tokens hold
    left_out = before >= mass * ordered.sum(-1, keepdim=True)
    left_out[:, 0] = False
    return torch.zeros_like(probabilities).scatter_(-1, tokens, ordered.masked_fill(left_out, 0))


def pick(logits, sampling, generator):
    """The next token (B,) of each row of logits (B, V), drawn as a Sampling says."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    if 0 < sampling.top_k < logits.shape[-1]:
        probabilities = most_probable(probabilities, sampling.top_k)
    if sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


@contextlib.contextmanager
def generating(model):
    """Evaluation mode inside, the mode that was after."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def go_on(model, logits, state, count, sampling, generator):
    """Yield `count` tokens (B,) from the logits of the first of them on."""
    for remaining in reversed(range(count)):
        token = pick(logits, sampling, generator)
        yield token
        if remaining:
            logits, state = model.step(token, state)


@torch.no_grad()
def continue_text(model, prompt, count, sampling=WHOLE_SOFTMAX, generator=None):
    """Yield `count` next tokens (B,) after prompt (B, n), n >= 1, each as soon as it is known."""
    with generating(model):
        yield from go_on(model, *read_prompt(model, prompt), count, sampling, generator)


@torch.no_grad()
def continue_in_new_window(model, context, count, sampling=GREEDY, generator=None):
    """Yield `count` next tokens (B,) after a context (B, n), n >= 1, of a pretrained_recurrence model (section 5.3).

    The context is read window by window; the continuation stands in a new window, which begins with the context's last token, or
    the last o where windows overlap, and knows of the rest by what is inserted into it; plain GPT-2 knows nothing of it. From a
    full window the text goes on in the next.
    """
    config = model.config
    with generating(model):
        state = model.initial_state(len(context))
        for start in range(0, context.shape[1] - config.overlap, config.stride):
            state = model.advance(context[:, start : start + config.segment], state)
        for token in context[:, -max(1, config.overlap) :].unbind(1):
            logits, state = model.step(token, state)
        yield from go_on(model, logits, state, count, sampling, generator)


def prompt_from(document, length=32):
    """The opening tokens of a document, (1, length)."""
    return torch.as_tensor(document.inputs[:length].astype("int64"))[None]


def show_text(tokenizer, ids):
    """Ids as text for a terminal; bytes that are no UTF-8 become replacement characters."""
    return tokenizer.decode(ids).decode("utf-8", errors="replace")


def stream_text(tokenizer, tokens, write):
    """Write tokens, ids or tensors of one, as text as soon as they arrive; returns their ids.

    write takes text. Bytes of an unfinished UTF-8 character wait for the rest of it; bytes that are no UTF-8 become replacement
    characters. All of it together is show_text of the ids.
    """
    decoder, ids = codecs.getincrementaldecoder("utf-8")(errors="replace"), []
    for token in tokens:
        ids.append(int(token))
        if text := decoder.decode(tokenizer.decode(ids[-1:])):
            write(text)
    if text := decoder.decode(b"", final=True):
        write(text)
    return ids
