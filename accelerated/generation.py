"""Continuing a text token by token, with the state carried over any length."""

import torch


@torch.no_grad()
def read_prompt(model, prompt):
    """Read prompt (B, n), n >= 1, from a document's start; returns the logits after it (B, V) and the state.

    Whole segments go through `advance`, the rest token by token.
    """
    length, segment = prompt.shape[1], model.config.segment
    state, at = model.initial_state(len(prompt)), 0
    while length - at > segment:
        state = model.advance(prompt[:, at : at + segment], state)
        at += segment
    for token in prompt[:, at:].unbind(1):
        logits, state = model.step(token, state)
    return logits, state


def pick(logits, temperature, generator):
    """The next token of each row of logits (B, V): the most probable at temperature 0, else drawn from softmax(logits / T)."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.double() / temperature, -1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


@torch.no_grad()
def continue_text(model, prompt, count, temperature=1.0, generator=None):
    """Yield `count` next tokens (B,) after prompt (B, n), n >= 1, each as soon as it is known."""
    training = model.training
    model.eval()
    try:
        logits, state = read_prompt(model, prompt)
        for remaining in reversed(range(count)):
            token = pick(logits, temperature, generator)
            yield token
            if remaining:
                logits, state = model.step(token, state)
    finally:
        model.train(training)


def prompt_from(document, length=32):
    """The opening tokens of a document, (1, length)."""
    return torch.as_tensor(document.inputs[:length].astype("int64"))[None]


def show_text(tokenizer, ids):
    """Ids as text for a terminal; bytes that are no UTF-8 become replacement characters."""
    return tokenizer.decode(ids).decode("utf-8", errors="replace")
