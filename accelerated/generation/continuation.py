"""Continues a text of any length: eval.py sample, train.py and accelerated.generate use it."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from accelerated.attention.heads import at_least_float32
from accelerated.generation.any_model import Stepper, Stream, stepper_of
from accelerated.program.errors import InputError
from accelerated.program.progress import Progress
from accelerated.protocol import Model, evaluating, overlap_of


class Sampling(NamedTuple):
    """How the next token is drawn: from softmax(logits / temperature), limited to its nucleus."""

    temperature: float = 1.0  # 0 takes the most probable token; top_p then has no effect
    top_p: float = 1.0  # total probability of the nucleus; 1 for all tokens


@torch.no_grad()
def continue_text(
    model: Model,
    prompt: Tensor,
    count: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    new_window: bool = False,
) -> Iterator[Tensor]:
    """Yield `count` next tokens (B,) after prompt (B, n), n >= 1, each as soon as it is known.

    new_window is as for read_prompt.
    """
    stepper = stepper_of(model)
    with evaluating(model):
        logits, stream = read_prompt(stepper, prompt, new_window)
        yield from drawn_tokens(logits, stream, count, sampling, generator, stepper.step)


@torch.no_grad()
def read_prompt(
    stepper: Stepper, prompt: Tensor, new_window: bool = False
) -> tuple[Tensor, Stream]:
    """The logits (B, V) and the Stream after prompt (B, n), n >= 1, read from a document's start.

    Whole segments go through `advance`, the rest through the Stepper. If there is more than a
    segment, progress is shown.

    new_window is for models that read windows (Adding Recurrence, section 5.3): all windows go
    through `advance`, and a new one begins with the prompt's last token, or its last o if windows
    overlap. It sees earlier text only through the inserted vectors; in plain GPT-2 not at all.
    """
    model = stepper.model
    segment = model.config.segment
    overlap = overlap_of(model.config)
    length = prompt.shape[1]
    rest = overlap if new_window else segment  # `advance` reads while more than this is left
    state = model.initial_state(len(prompt))
    start = 0
    with Progress("reading the prompt", length, show=length > segment) as bar:
        with torch.inference_mode():  # a tenth faster than torch.no_grad
            while length - start > rest:
                state = model.advance(prompt[:, start : start + segment], state)
                start += segment - overlap
                bar.update(segment - overlap)

        state = tree_map(torch.clone, state)  # ordinary tensors, which can be changed in place
        unread = prompt[:, -max(1, overlap) :] if new_window else prompt[:, start:]
        logits, stream = stepper.read(unread, state)
        bar.update(unread.shape[1])
    return logits, stream


def drawn_tokens(
    logits: Tensor,
    stream: Stream,
    count: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    step: Callable,
) -> Iterator[Tensor]:
    """Yield `count` tokens (B,): the first is drawn from logits (B, V), the others by `step`.

    Raises InputError if logits are NaN or infinite: nothing can be drawn from them.
    """
    for number in range(1, count + 1):
        if not torch.isfinite(logits).all():
            raise InputError(
                f"the model's prediction of token {number:,} of the continuation is NaN or "
                "infinite; give another --checkpoint, or train again"
            )
        token = draw(logits, sampling, generator)
        yield token
        if number < count:
            logits, stream = step(token, stream)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """The next token (B,) of each row of logits (B, V), drawn as `sampling` says."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(at_least_float32(logits) / sampling.temperature, -1)
    if sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def nucleus(probabilities: Tensor, mass: float) -> Tensor:
    """Each row (B, V) with only the fewest, most probable tokens that hold `mass` of its sum.

    Holtzman et al. 2019; Compressive Transformers (appendix E) uses mass 0.98.
    """
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    before = functional.pad(ordered.cumsum(-1)[:, :-1], (1, 0))  # sum of more probable tokens
    left_out = before >= mass * ordered.sum(-1, keepdim=True)
    left_out[:, 0] = False
    return torch.zeros_like(probabilities).scatter_(-1, tokens, ordered.masked_fill(left_out, 0))
