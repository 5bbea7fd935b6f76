"""Long-memory Transformers in PyTorch: `load` opens a trained model, `generate` continues a text (docs/library.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from accelerated.data.tokenizers import Tokenizer
    from accelerated.training.settings import Settings


class Loaded(NamedTuple):
    """A trained model, and what is needed to use it."""

    model: torch.nn.Module  # in evaluation mode
    tokenizer: Tokenizer
    settings: Settings


def load(path: str | Path, checkpoint: str = "last", device: str | torch.device = "cpu") -> Loaded:
    """Open a run of train.py (its checkpoint last or best), a folder of eval.py export, or a published GPT-2.

    Raises InputError if path is none of these, or damaged.
    """
    from accelerated.training.checkpoint import (
        load_weights,
        open_model,
    )  # here: train.py --help needs no torch
    from accelerated.training.settings import settings_from

    contents = load_weights(path, checkpoint)
    settings = settings_from(contents, path)
    return Loaded(*open_model(path, contents, settings, device=device), settings)


def generate(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    stream: bool = False,
) -> str | Iterator[str]:
    """Return the text that continues a prompt of any length; with `stream` an iterator of its pieces.

    It has `tokens` tokens, drawn from the most probable ones that hold top_p of the probability; temperature 0 takes the most
    probable one each time. Raises InputError if the prompt has no token, or the model predicts NaN.
    """
    import torch

    from accelerated.evaluation.sample import stream_text
    from accelerated.generation.continuation import Sampling, continue_text
    from accelerated.program.errors import InputError

    device, ids = next(model.parameters()).device, tokenizer.encode(prompt).tolist()
    if not ids:
        raise InputError("the prompt is empty, or has no token for this tokenizer; give another")
    generator, sampling = torch.Generator(device).manual_seed(seed), Sampling(temperature, top_p)
    drawn = continue_text(model, torch.tensor([ids], device=device), tokens, sampling, generator)
    pieces = stream_text(tokenizer, drawn)
    return pieces if stream else "".join(pieces)
