"""eval.py sample, train.py's sample and the bench: continuing a text token by token, with the state carried over any length."""

import argparse
import codecs
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import Module, functional

from accelerated.data.windows import Document, overlap_of
from accelerated.errors import InputError
from accelerated.evaluation.score import Report, Run, at_least, evaluating, number


class Sampling(NamedTuple):
    """How the next token is drawn: from softmax(logits / temperature), of its top k tokens, of their nucleus."""

    temperature: float = 1.0  # 0 takes the most probable token, whatever the others say
    top_k: int = 0  # how many of the most probable tokens; 0 for all
    top_p: float = 1.0  # what the nucleus's probabilities add up to; 1 for all


@torch.no_grad()
def read_prompt(model: Module, prompt: torch.Tensor, new_window: bool = False) -> tuple[torch.Tensor, tuple]:
    """Read prompt (B, n), n >= 1, from a document's start; returns the logits after it (B, V) and the state.

    Whole segments go through `advance`, the rest token by token. new_window is for pretrained_recurrence (section 5.3): all
    windows go through `advance`, and a new one begins with the prompt's last token, or the last o if windows overlap. It knows
    of the rest by what is inserted into it; plain GPT-2 knows nothing of it.
    """
    length, segment, overlap = prompt.shape[1], model.config.segment, overlap_of(model.config)
    state, at = model.initial_state(len(prompt)), 0
    while at < length - (overlap if new_window else segment):
        state = model.advance(prompt[:, at : at + segment], state)
        at += segment - overlap
    rest = max(1, overlap) if new_window else length - at
    for token in prompt[:, -rest:].unbind(1):
        logits, state = model.step(token, state)
    return logits, state


def most_probable(probabilities: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` most probable tokens of each row of probabilities (B, V), the others at 0; not normalised again."""
    values, tokens = probabilities.topk(count, -1)  # (B, k)
    return torch.zeros_like(probabilities).scatter_(-1, tokens, values)


def nucleus(probabilities: torch.Tensor, mass: float) -> torch.Tensor:
    """The fewest most probable tokens of each row of probabilities (B, V) that hold `mass` of its sum, the others at 0.

    One token at least (Holtzman et al. 2019; the samples of Compressive Transformers, appendix E, have mass 0.98).
    """
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    before = functional.pad(ordered.cumsum(-1)[:, :-1], (1, 0))  # what more probable tokens hold
    left_out = before >= mass * ordered.sum(-1, keepdim=True)
    left_out[:, 0] = False
    return torch.zeros_like(probabilities).scatter_(-1, tokens, ordered.masked_fill(left_out, 0))


def pick(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> torch.Tensor:
    """The next token (B,) of each row of logits (B, V), drawn as a Sampling says."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    if 0 < sampling.top_k < logits.shape[-1]:
        probabilities = most_probable(probabilities, sampling.top_k)
    if sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def go_on(
    model: Module, logits: torch.Tensor, state: tuple, count: int, sampling: Sampling, generator: torch.Generator | None
) -> Iterator[torch.Tensor]:
    """Yield `count` tokens (B,), the first of them drawn from logits (B, V)."""
    for remaining in reversed(range(count)):
        token = pick(logits, sampling, generator)
        yield token
        if remaining:
            logits, state = model.step(token, state)


@torch.no_grad()
def continue_text(
    model: Module, prompt: torch.Tensor, count: int, sampling: Sampling,
    generator: torch.Generator | None = None, new_window: bool = False,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """Yield `count` next tokens (B,) after prompt (B, n), n >= 1, each as soon as it is known; new_window as for read_prompt."""
    with evaluating(model):
        yield from go_on(model, *read_prompt(model, prompt, new_window), count, sampling, generator)


def prompt_from(document: Document, length: int = 32) -> torch.Tensor:
    """The opening tokens of a document, (1, length)."""
    return torch.as_tensor(document.inputs[:length].astype("int64"))[None]


def show_text(tokenizer, ids: Iterable[int]) -> str:
    """Ids as text for a terminal; bytes that are not UTF-8 become replacement characters."""
    return tokenizer.decode(ids).decode("utf-8", errors="replace")


def stream_text(tokenizer, tokens: Iterable, write: Callable[[str], None]) -> list[int]:
    """Write tokens, ids or tensors of one, as text as soon as they arrive; returns their ids.

    Bytes of an unfinished UTF-8 character wait for the rest of it. All that is written is show_text of the ids.
    """
    decoder, ids = codecs.getincrementaldecoder("utf-8")(errors="replace"), []
    for token in tokens:
        ids.append(int(token))
        if text := decoder.decode(tokenizer.decode(ids[-1:])):
            write(text)
    if text := decoder.decode(b"", final=True):
        write(text)
    return ids


def prompt_in_file(path: str) -> bytes:
    """The content of --prompt-file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read --prompt-file {path}: {error.strerror}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=at_least(1), default=200, metavar="N", help="how many to add (default 200)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", type=os.fsencode, metavar="TEXT", default=b"\n", help="text to continue (default a newline)")
    prompts.add_argument(
        "--prompt-file", type=prompt_in_file, dest="prompt", metavar="FILE", default=argparse.SUPPRESS,
        help="a file to continue, of any length",
    )  # fmt: skip
    fits = number(float, lambda t: t == 0 or 0.001 <= t < math.inf, "0 for the most probable token, or at least 0.001")
    parser.add_argument(
        "--temperature", type=fits, default=0.8,
        help="below 1 favours probable tokens; 0 takes the most probable (default 0.8)",
    )  # fmt: skip
    parser.add_argument("--top-k", type=at_least(1), metavar="K", help="sample from the K most probable tokens (default all)")
    parser.add_argument(
        "--top-p", type=number(float, lambda p: 0 < p <= 1, "above 0 and at most 1"), metavar="P",
        help="nucleus sampling: from the fewest tokens that have probability P together; 0.98 is the Compressive Transformer's "
        "(default 1: all)",
    )  # fmt: skip
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the random numbers (default 0)")
    parser.add_argument(
        "--new-window", action="store_true", default=None,
        help="continue in a new window that begins with the prompt's last token and knows the rest by the inserted vector alone "
        "(pretrained_recurrence, section 5.3; the paper takes --temperature 0)",
    )  # fmt: skip


def report(run: Run, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Print the prompt and, as it comes, its continuation; with --json both are in the record instead."""
    if options.temperature == 0 and (options.top_k or options.top_p):
        raise InputError("--temperature 0 takes the most probable token; leave --top-k and --top-p out")
    if not options.prompt:
        raise InputError("the prompt is empty; give at least one character to continue")
    device = next(run.model.parameters()).device
    ids = run.tokenizer.encode(options.prompt).astype("int64")
    sampling = Sampling(options.temperature, options.top_k or 0, options.top_p or 1.0)
    generator = torch.Generator(device).manual_seed(options.seed)
    prompt = torch.tensor(ids, device=device)[None]
    tokens = continue_text(run.model, prompt, options.tokens, sampling, generator, options.new_window)
    show = (lambda text: None) if options.json else lambda text: print(text, end="", flush=True)
    text = stream_text(run.tokenizer, itertools.chain(ids, tokens), show)
    record = {"prompt": show_text(run.tokenizer, ids), "continuation": show_text(run.tokenizer, text[len(ids) :])}
    return record, []  # the lines are shown already


REPORT = Report("a continuation of a text", "RUN --prompt 'def ' --top-p 0.98", report, add_options, splits=())
