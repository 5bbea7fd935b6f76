"""Long-memory Transformers in PyTorch: `load` opens a trained model, `generate` continues a text.

docs/library.md says more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # train.py --help needs no torch, so it is imported only where it is used
    import torch

    from accelerated.data.tokenizers import Tokenizer
    from accelerated.protocol import Model
    from accelerated.training.settings import Settings


class Loaded(NamedTuple):
    """A trained model, and what is needed to use it."""

    model: Model  # in evaluation mode
    tokenizer: Tokenizer
    settings: Settings


def load(path: str | Path, checkpoint: str = "last", device: str | torch.device = "cpu") -> Loaded:
    """Open a run of train.py, a folder that `eval.py export` wrote, or a published decoder.

    `checkpoint` is "last" or "best", and applies to a run. Raises InputError if path is none of
    these or is damaged, or if torch finds no such device.
    """
    from accelerated.training.checkpoint import load_weights, open_model
    from accelerated.training.process import choose_device
    from accelerated.training.settings import settings_from

    device = choose_device(device)
    contents = load_weights(path, checkpoint)
    settings = settings_from(contents, path)
    model, tokenizer = open_model(path, contents, settings, device=device)
    return Loaded(model, tokenizer, settings)


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    stream: bool = False,
) -> str | Iterator[str]:
    """Continue a prompt of any length; returns the text, or an iterator of its pieces if `stream`.

    Draws `tokens` tokens by nucleus (top-p) sampling; temperature 0 is greedy decoding. Raises
    InputError if the prompt is empty, if temperature or top_p is out of range, or if the model's
    logits are NaN or infinite.
    """
    import torch

    from accelerated.evaluation.sample import ids_of, sampling_of, stream_text
    from accelerated.generation.continuation import continue_text

    sampling = sampling_of(temperature, top_p)
    ids = ids_of(tokenizer, prompt.encode())
    device = model.embedding.device
    generator = torch.Generator(device).manual_seed(seed)
    read = torch.tensor([ids], device=device)
    drawn = continue_text(model, read, tokens, sampling, generator)
    pieces = stream_text(tokenizer, drawn)
    return pieces if stream else "".join(pieces)
