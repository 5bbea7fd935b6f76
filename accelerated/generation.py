"""Continuing a text token by token, with the state carried over any length."""

import contextlib

import torch

from accelerated.windows import overlap_of


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


def pick(logits, temperature, generator):
    """The next token of each row of logits (B, V): the most probable at temperature 0, else drawn from softmax(logits / T)."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.double() / temperature, -1)
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


def go_on(model, logits, state, count, temperature, generator):
    """Yield `count` tokens (B,) from the logits of the first of them on."""
    for remaining in reversed(range(count)):
        token = pick(logits, temperature, generator)
        yield token
        if remaining:
            logits, state = model.step(token, state)


@torch.no_grad()
def continue_text(model, prompt, count, temperature=1.0, generator=None):
    """Yield `count` next tokens (B,) after prompt (B, n), n >= 1, each as soon as it is known."""
    with generating(model):
        yield from go_on(model, *read_prompt(model, prompt), count, temperature, generator)


@torch.no_grad()
def continue_in_new_window(model, context, count, temperature=0.0, generator=None):
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
        yield from go_on(model, logits, state, count, temperature, generator)


def prompt_from(document, length=32):
    """The opening tokens of a document, (1, length)."""
    return torch.as_tensor(document.inputs[:length].astype("int64"))[None]


def show_text(tokenizer, ids):
    """Ids as text for a terminal; bytes that are no UTF-8 become replacement characters."""
    return tokenizer.decode(ids).decode("utf-8", errors="replace")
