"""eval.py sample: a prompt and its continuation, written token by token."""

import argparse
import codecs
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import SupportsInt

import torch

from accelerated.data.tokenizers import Tokenizer
from accelerated.evaluation.score import Answer, TrainedRun
from accelerated.generation.continuation import Sampling, continue_text
from accelerated.program.errors import InputError


def show_text(tokenizer: Tokenizer, ids: Iterable[SupportsInt]) -> str:
    """Decode ids, numbers or one-element tensors, for a terminal.

    Bytes that are not UTF-8 become replacement characters.
    """
    return tokenizer.decode(ids).decode("utf-8", errors="replace")


def stream_text(tokenizer: Tokenizer, tokens: Iterable[SupportsInt]) -> Iterator[str]:
    """Yield the text of tokens, ids or one-element tensors, each UTF-8 character once complete.

    Joined, it equals show_text.
    """
    spelled = (tokenizer.decode([token]) for token in tokens)
    return codecs.iterdecode(spelled, "utf-8", errors="replace")


def write_continuation(
    tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[SupportsInt]
) -> None:
    """Write a prompt and its continuation as text, token by token."""
    pieces = stream_text(tokenizer, tokens)
    first = next(pieces, "")  # reads the prompt: its errors come before any output
    sys.stdout.write(show_text(tokenizer, prompt))
    try:
        for piece in itertools.chain([first], pieces):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        print()  # an error has a line of its own


def prompt_of(run: TrainedRun, options: argparse.Namespace) -> list[int]:
    """The tokens to continue.

    Raises InputError if the prompt has no tokens, or if options contradict each other or the run.
    """
    if options.prompt is not None and options.prompt_file is not None:
        raise InputError("--prompt and --prompt-file are two prompts; give one of them")
    if options.new_window and not hasattr(run.model.config, "overlap"):
        raise InputError(
            f"--new-window is for models that read windows, this is {run.settings.model}; "
            "leave it out"
        )
    given = options.prompt if options.prompt_file is None else options.prompt_file
    if given is None:
        given = b"\n"
    return ids_of(run.tokenizer, given)


def ids_of(tokenizer: Tokenizer, prompt: bytes) -> list[int]:
    """The tokens of a prompt; raises InputError if there are none."""
    ids = tokenizer.encode(prompt).tolist()
    if not ids:
        raise InputError("the prompt is empty, or has no token for the tokenizer; give another")
    return ids


def sampling_of(temperature: float, top_p: float) -> Sampling:
    """How to sample; raises InputError if that is impossible, or does not go together."""
    if not (temperature >= 0 and 0 < top_p <= 1):
        raise InputError(
            f"temperature is {temperature} and top_p {top_p}; "
            "they must be at least 0, and above 0 and at most 1"
        )
    if temperature == 0 and top_p < 1:
        raise InputError("--temperature 0 takes the most probable token; leave --top-p out")
    return Sampling(temperature, top_p)


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """Write the prompt and its continuation token by token; with --json return both instead."""
    device = run.model.embedding.device
    prompt = prompt_of(run, options)
    sampling = sampling_of(options.temperature, options.top_p)
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
