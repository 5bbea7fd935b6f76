"""eval.py slots: what a Memformer's slots keep and read.

The weights are those of slot attention (Figure 2c): a slot's weight on itself is what it keeps, the
others are what it reads.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accelerated.data.windows import Document
from accelerated.evaluation.sample import show_text
from accelerated.evaluation.score import Answer, TrainedRun, carried_through
from accelerated.memformer import Memformer, Writer
from accelerated.program.errors import InputError

SHOWN = 8  # tokens that are shown
OFTEN = 20  # of those that were read so often


@torch.no_grad()
def writing(
    model: Memformer, documents: Sequence[Document], lanes: int
) -> tuple[np.ndarray, np.ndarray]:
    """What each layer's heads keep of a slot, a mean (L, H); the slots' weight on each token (V,).

    A token's weight is relative to the mean token's, 0 if it was read seldom. Of all segments after
    a document's first whose tokens are all scored.
    """
    seen = []  # the weights (B, H, S, 1 + N) of each writer in a segment

    def watch(writer: Writer, given: tuple, _: Tensor) -> None:
        memory, encoded, *others = given
        seen.append(writer.weights(memory, writer.norm(encoded), *others))

    writers = [module for module in model.modules() if isinstance(module, Writer)]
    hooks = [writer.register_forward_hook(watch) for writer in writers]
    kept = np.zeros(())
    segments = 0
    weight = np.zeros(model.config.vocabulary)
    count = np.zeros(model.config.vocabulary)
    for segment, number, state, _ in carried_through(model, documents, lanes, predict=False):
        rows = (number > 0) & segment.scored.numpy().all(1)
        weights = torch.stack(seen, 1).float().cpu().numpy()[rows]
        weights = weights.astype(np.float64)  # (b, L, H, S, 1 + N)
        seen.clear()
        kept = kept + weights[..., 0].mean(-1).sum(0)
        segments += len(weights)

        _, previous = state
        read = previous if previous.numel() else segment.tokens
        tokens = read.cpu().numpy()[rows].flatten()
        np.add.at(weight, tokens, weights[..., 1:].mean((1, 2, 3)).flatten())
        np.add.at(count, tokens, 1)
    for hook in hooks:
        hook.remove()
    if not segments:
        raise InputError(
            "no document has two segments that are scored, so nothing is written; "
            "give longer documents (--data)"
        )
    mean = weight.sum() / count.sum()
    return kept / segments, np.where(count < OFTEN, 0.0, weight / np.maximum(count, 1) / mean)


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """What the slots keep and read."""
    assert isinstance(run.model, Memformer)
    kept, weight = writing(run.model, run.documents, run.lane_count)

    lines = ["what a slot keeps of itself in a segment, by head"]
    for layer, heads in enumerate(kept.tolist(), start=1):
        name = f"layer {layer}" if len(kept) > 1 else "all slots"
        lines.append(f"{name:<12}" + "   ".join(f"{share:.3f}" for share in heads))
    most = np.argsort(-weight)[:SHOWN].tolist()
    most_read = [(show_text(run.tokenizer, [token]), weight[token].item()) for token in most]
    lines.append("tokens that slots read most, with their weight over the mean token's")
    lines.append("   ".join(f"{text!r} {times:.2f}" for text, times in most_read))
    return {"kept": kept.tolist(), "most_read": dict(most_read)}, lines
