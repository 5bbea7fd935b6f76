"""Continues a text of any length token by token, carrying the state: for eval.py sample, train.py and the bench."""

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
from torch.utils._pytree import tree_leaves, tree_map

from accelerated.attention.heads import at_least_float32
from accelerated.data.sources import read_errors
from accelerated.data.windows import Document, overlap_of
from accelerated.evaluation.report import Report, TrainedRun, at_least, number
from accelerated.evaluation.score import evaluating
from accelerated.program.errors import InputError
from accelerated.protocol import Stream, open_stream


class Sampling(NamedTuple):
    """How the next token is drawn: from softmax(logits / temperature), limited to the top k tokens, then to their nucleus."""

    temperature: float = 1.0  # 0 takes the most probable token; top_k and top_p then have no effect
    top_k: int = 0  # how many of the most probable tokens; 0 for all
    top_p: float = 1.0  # total probability of the nucleus; 1 for all tokens


class GraphedStep:
    """A model's `step` on a GPU: the kernels of a token are captured once in a CUDA graph and then launched together.

    A graph reads and writes fixed addresses, so it has a token, a position and rows of its own; each new segment's rows are
    copied into them. It holds the number of lanes of its first token, and the parameters as they were then; a parameter may
    change in place, but not be replaced.
    """

    def __init__(self, model: Module):
        self.model, self.graph = model, None

    @torch.no_grad()
    def __call__(self, token: torch.Tensor, state: tuple) -> tuple[torch.Tensor, Stream]:
        """The same as model.step(token, state). A Stream of an earlier segment cannot be continued."""
        stream = open_stream(self.model, token, state)
        if self.graph is None:
            self.capture(token, stream)
        if stream.rows is not self.rows:
            torch._foreach_copy_(tree_leaves(self.rows), tree_leaves(stream.rows))
        self.token.copy_(token)
        self.position.fill_(stream.read)
        self.graph.replay()
        return self.logits.clone(), self.model.next_stream(stream._replace(rows=self.rows))

    def capture(self, token: torch.Tensor, stream: Stream) -> None:
        """Record the kernels of a token; a first run, outside the recording, lets libraries prepare themselves."""
        self.token, self.position = token.clone(), token.new_full((1,), stream.read)
        self.rows = tree_map(torch.clone, stream.rows)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.model.read_token(self.token, self.position, self.rows)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.model.read_token(self.token, self.position, self.rows)


def step_of(model: Module) -> Callable:
    """The fastest `step` of the model: a GraphedStep if its parameters are on a CUDA device."""
    return GraphedStep(model) if next(model.parameters()).is_cuda else model.step


@torch.no_grad()
def read_prompt(
    model: Module, prompt: torch.Tensor, new_window: bool = False, step: Callable | None = None
) -> tuple[torch.Tensor, tuple]:
    """Read prompt (B, n), n >= 1, from a document's start; returns the logits after it (B, V) and the state.

    Whole segments go through `advance`, the rest token by token through step, which is model.step if it is None.

    new_window is for pretrained_recurrence (section 5.3): all windows go through `advance`, and a new window begins with the
    prompt's last token, or its last o if windows overlap. The new window sees earlier text only through the inserted vectors;
    in plain GPT-2 not at all.
    """
    length, segment, overlap = prompt.shape[1], model.config.segment, overlap_of(model.config)
    state, at = model.initial_state(len(prompt)), 0
    while at < length - (overlap if new_window else segment):
        state = model.advance(prompt[:, at : at + segment], state)
        at += segment - overlap
    rest, step = max(1, overlap) if new_window else length - at, step or model.step
    for token in prompt[:, -rest:].unbind(1):
        logits, state = step(token, state)
    return logits, state


def most_probable(probabilities: torch.Tensor, count: int) -> torch.Tensor:
    """Keep the `count` most probable tokens of each row of probabilities (B, V), with the others at 0; not normalised again."""
    values, tokens = probabilities.topk(count, -1)  # (B, k)
    return torch.zeros_like(probabilities).scatter_(-1, tokens, values)


def nucleus(probabilities: torch.Tensor, mass: float) -> torch.Tensor:
    """Keep, in each row of probabilities (B, V), the fewest most probable tokens that hold `mass` of its sum; others at 0."""
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    before = functional.pad(ordered.cumsum(-1)[:, :-1], (1, 0))  # sum of more probable tokens
    left_out = before >= mass * ordered.sum(-1, keepdim=True)
    left_out[:, 0] = False  # Holtzman et al. 2019; Compressive Transformers (appendix E) uses mass 0.98
    return torch.zeros_like(probabilities).scatter_(-1, tokens, ordered.masked_fill(left_out, 0))


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> torch.Tensor:
    """The next token (B,) of each row of logits (B, V), drawn as `sampling` says."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(at_least_float32(logits) / sampling.temperature, -1)
    if 0 < sampling.top_k < logits.shape[-1]:
        probabilities = most_probable(probabilities, sampling.top_k)
    if sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def generate(
    model: Module, logits: torch.Tensor, state: tuple, count: int, sampling: Sampling,
    generator: torch.Generator | None = None, step: Callable | None = None,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """Yield `count` tokens (B,); the first is drawn from logits (B, V). step is the model's fastest if it is None."""
    step = step or step_of(model)
    for remaining in reversed(range(count)):
        token = draw(logits, sampling, generator)
        yield token
        if remaining:
            logits, state = step(token, state)


@torch.no_grad()
def continue_text(
    model: Module, prompt: torch.Tensor, count: int, sampling: Sampling,
    generator: torch.Generator | None = None, new_window: bool = False,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """Yield `count` next tokens (B,) after prompt (B, n), n >= 1, each as soon as it is known; new_window as for read_prompt."""
    with evaluating(model):
        step = step_of(model)
        yield from generate(model, *read_prompt(model, prompt, new_window, step), count, sampling, generator, step)


def prompt_from(document: Document, length: int = 32) -> torch.Tensor:
    """The first tokens of a document, (1, length)."""
    return torch.as_tensor(document.inputs[:length].astype("int64"))[None]


def show_text(tokenizer: object, ids: Iterable[int]) -> str:
    """Decode ids for a terminal; bytes that are not UTF-8 become replacement characters."""
    return tokenizer.decode(ids).decode("utf-8", errors="replace")


def stream_text(tokenizer: object, tokens: Iterable) -> Iterator[str]:
    """Yield the text of tokens (ids or one-element tensors), each UTF-8 character once complete; joined, it equals show_text."""
    return codecs.iterdecode((tokenizer.decode([int(token)]) for token in tokens), "utf-8", errors="replace")


def prompt_in_file(path: str) -> bytes:
    """The bytes of the file that --prompt-file names."""
    with read_errors(f"--prompt-file {path}"):
        return Path(path).read_bytes()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=at_least(1), default=200, metavar="N", help="how many tokens to add (default 200)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", type=os.fsencode, metavar="TEXT", default=b"\n", help="text to continue (default a newline)")
    file = {"type": prompt_in_file, "metavar": "FILE", "help": "file with the text to continue, of any length"}
    prompts.add_argument("--prompt-file", dest="prompt", default=argparse.SUPPRESS, **file)
    fits = number(float, lambda t: t == 0 or 0.001 <= t < math.inf, "0 for the most probable token, or at least 0.001")
    text = "below 1 favours probable tokens; 0 takes the most probable (default 0.8)"
    parser.add_argument("--temperature", type=fits, default=0.8, help=text)
    parser.add_argument("--top-k", type=at_least(1), metavar="K", help="sample from the K most probable tokens (default all)")
    fits = number(float, lambda p: 0 < p <= 1, "above 0 and at most 1")
    text = "sample from the fewest tokens with total probability P; the Compressive Transformer paper uses 0.98 (default 1: all)"
    parser.add_argument("--top-p", type=fits, metavar="P", help=text)
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of the random numbers (default 0)")
    text = (
        "continue in a new window that begins with the prompt's last token and sees the rest only through the inserted vectors "
        "(pretrained_recurrence, section 5.3; the paper uses --temperature 0)"
    )
    parser.add_argument("--new-window", action="store_true", default=None, help=text)


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Print the prompt and its continuation token by token; with --json return both instead."""
    if options.temperature == 0 and (options.top_k or options.top_p):
        raise InputError("--temperature 0 takes the most probable token; leave --top-k and --top-p out")
    if not options.prompt:
        raise InputError("the prompt is empty; give at least one character to continue")
    device = next(run.model.parameters()).device
    prompt = torch.tensor(run.tokenizer.encode(options.prompt).astype("int64"), device=device)
    sampling = Sampling(options.temperature, options.top_k or 0, options.top_p or 1.0)
    generator = torch.Generator(device).manual_seed(options.seed)
    tokens = continue_text(run.model, prompt[None], options.tokens, sampling, generator, options.new_window)
    if options.json:
        continuation = show_text(run.tokenizer, [int(token) for token in tokens])
        return {"prompt": show_text(run.tokenizer, prompt.tolist()), "continuation": continuation}, []
    for text in stream_text(run.tokenizer, itertools.chain(prompt.tolist(), tokens)):
        print(text, end="", flush=True)
    return {}, []  # everything is already printed


REPORT = Report("a continuation of a text", "RUN --prompt 'def ' --top-p 0.98", report, add_options, splits=())
