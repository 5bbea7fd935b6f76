"""Continues a text of any length token by token: for eval.py sample, train.py and lab/speed."""

import argparse
import codecs
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.utils._pytree import tree_leaves, tree_map

from accelerated.attention.heads import at_least_float32
from accelerated.data.tokenizers import Tokenizer
from accelerated.evaluation.score import TrainedRun, evaluating
from accelerated.program.errors import InputError
from accelerated.program.progress import Progress
from accelerated.protocol import Stream, open_stream, overlap_of


class Sampling(NamedTuple):
    """How the next token is drawn: from softmax(logits / temperature), limited to its nucleus."""

    temperature: float = 1.0  # 0 takes the most probable token; top_p then has no effect
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
    def __call__(self, token: Tensor, state: tuple) -> tuple[Tensor, Stream]:
        """The same as model.step(token, state). A Stream of an earlier segment cannot be continued."""
        stream = open_stream(self.model, token, state)
        if self.graph is None:
            self.capture(token, stream)
        if stream.rows is not self.rows:
            torch._foreach_copy_(tree_leaves(self.rows), tree_leaves(stream.rows))
        self.token.copy_(token)
        self.position.fill_(stream.position)
        self.graph.replay()
        return self.logits.clone(), self.model.next_stream(stream._replace(rows=self.rows))

    def capture(self, token: Tensor, stream: Stream) -> None:
        """Record the kernels of a token; a first run, outside the recording, lets libraries prepare themselves."""
        self.token, self.position = token.clone(), token.new_full((1,), stream.position)
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
    model: Module, prompt: Tensor, new_window: bool = False, step: Callable | None = None
) -> tuple[Tensor, tuple]:
    """Read prompt (B, n), n >= 1, from a document's start; returns the logits after it (B, V) and the state.

    Whole segments go through `advance`, the rest token by token through step, which is model.step if it is None. If there is
    more than a segment, its progress is shown.

    new_window is for models that read windows (Adding Recurrence, section 5.3): all windows go through `advance`, and a new one
    begins with the prompt's last token, or its last o if windows overlap. It sees earlier text only through the inserted
    vectors; in plain GPT-2 not at all.
    """
    length, segment, overlap = prompt.shape[1], model.config.segment, overlap_of(model.config)
    state, at = model.initial_state(len(prompt)), 0
    with Progress("reading the prompt", length, show=length > segment) as bar:
        with torch.inference_mode():  # a tenth faster than torch.no_grad
            while at < length - (overlap if new_window else segment):
                state = model.advance(prompt[:, at : at + segment], state)
                at += segment - overlap
                bar.update(segment - overlap)
        state = tree_map(torch.clone, state)  # ordinary tensors, which can be changed in place
        rest, step = max(1, overlap) if new_window else length - at, step or model.step
        for token in prompt[:, -rest:].unbind(1):
            logits, state = step(token, state)
            bar.update()
    return logits, state


def nucleus(probabilities: Tensor, mass: float) -> Tensor:
    """Keep, in each row of probabilities (B, V), the fewest most probable tokens that hold `mass` of its sum; others at 0."""
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    before = functional.pad(ordered.cumsum(-1)[:, :-1], (1, 0))  # sum of more probable tokens
    left_out = before >= mass * ordered.sum(-1, keepdim=True)
    left_out[:, 0] = (
        False  # Holtzman et al. 2019; Compressive Transformers (appendix E) uses mass 0.98
    )
    return torch.zeros_like(probabilities).scatter_(-1, tokens, ordered.masked_fill(left_out, 0))


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """The next token (B,) of each row of logits (B, V), drawn as `sampling` says."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(at_least_float32(logits) / sampling.temperature, -1)
    if sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def drawn_tokens(
    logits: Tensor,
    state: tuple,
    count: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    step: Callable,
) -> Iterator[Tensor]:
    """Yield `count` tokens (B,), the first drawn from logits (B, V), the others by `step`, such as model.step.

    Raises InputError if logits are NaN or infinite: nothing can be drawn from them.
    """
    for number in range(1, count + 1):
        if not torch.isfinite(logits).all():
            wrong = (
                f"the model's prediction of token {number:,} of the continuation is NaN or infinite"
            )
            raise InputError(f"{wrong}; give another --checkpoint, or train again")
        token = draw(logits, sampling, generator)
        yield token
        if number < count:
            logits, state = step(token, state)


@torch.no_grad()
def continue_text(
    model: Module,
    prompt: Tensor,
    count: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    new_window: bool = False,
) -> Iterator[Tensor]:
    """Yield `count` next tokens (B,) after prompt (B, n), n >= 1, each as soon as it is known; new_window as for read_prompt."""
    with evaluating(model):
        step = step_of(model)
        yield from drawn_tokens(
            *read_prompt(model, prompt, new_window, step), count, sampling, generator, step
        )


def show_text(tokenizer: Tokenizer, ids: Iterable) -> str:
    """Decode ids (numbers or one-element tensors) for a terminal; bytes that are not UTF-8 become replacement characters."""
    return tokenizer.decode(ids).decode("utf-8", errors="replace")


def stream_text(tokenizer: Tokenizer, tokens: Iterable) -> Iterator[str]:
    """Yield the text of tokens (ids or one-element tensors), each UTF-8 character once complete; joined, it equals show_text."""
    return codecs.iterdecode(
        (tokenizer.decode([token]) for token in tokens), "utf-8", errors="replace"
    )


def write_continuation(tokenizer: Tokenizer, prompt: list[int], tokens: Iterator) -> None:
    """Write a prompt and its continuation token by token: text, or the bytes of a recording."""
    text = tokenizer.spells_text
    pieces = (
        stream_text(tokenizer, tokens) if text else (tokenizer.decode([token]) for token in tokens)
    )
    out = sys.stdout if text else sys.stdout.buffer
    first = next(
        pieces, "" if text else b""
    )  # reads the prompt: its errors come before any output. Tokens may spell nothing
    out.write(show_text(tokenizer, prompt) if text else tokenizer.decode(prompt))
    try:
        for piece in itertools.chain([first], pieces):
            out.write(piece)
            out.flush()
    finally:
        if text:
            print()  # an error has a line of its own


def prompt_of(run: TrainedRun, options: argparse.Namespace) -> list[int]:
    """The tokens to continue; raises InputError if there are none, or if the options do not fit together or the run."""
    if options.temperature == 0 and options.top_p:
        raise InputError("--temperature 0 takes the most probable token; leave --top-p out")
    if options.prompt is not None and options.prompt_file is not None:
        raise InputError("--prompt and --prompt-file are two prompts; give one of them")
    if options.new_window and not hasattr(run.model.config, "overlap"):
        raise InputError(
            f"--new-window is for models that read windows, this is {run.settings.model}; leave it out"
        )
    given = next(
        (given for given in (options.prompt, options.prompt_file) if given is not None), b"\n"
    )
    if not (prompt := run.tokenizer.encode(given).tolist()):
        raise InputError(
            "the prompt is empty, or has no token for the run's tokenizer; give another --prompt or --prompt-file"
        )
    return prompt


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Write the prompt and its continuation token by token; with --json return both instead."""
    device, prompt = next(run.model.parameters()).device, prompt_of(run, options)
    sampling = Sampling(options.temperature, options.top_p or 1.0)
    generator = torch.Generator(device).manual_seed(options.seed)
    given = torch.tensor([prompt], device=device)
    tokens = continue_text(
        run.model, given, options.tokens, sampling, generator, options.new_window
    )
    if options.json:
        continuation = show_text(run.tokenizer, tokens)
        return {"prompt": show_text(run.tokenizer, prompt), "continuation": continuation}, []
    write_continuation(run.tokenizer, prompt, tokens)
    return {}, []  # everything is already written
