"""eval.py slots: what a Memformer's slots keep and read, and how far gradients reach back through them.

The weights are those of slot attention (Figure 2c): a slot's weight on itself is what it keeps, the others are what it reads.
"""

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import Module

from accelerated.attention.slots import Writer
from accelerated.data.lanes import Parts, one_pass
from accelerated.data.windows import Document, lengths_of
from accelerated.evaluation.sample import show_text
from accelerated.evaluation.score import TrainedRun, carried_through
from accelerated.program.errors import InputError
from accelerated.protocol import evaluating
from accelerated.replay import summed_nats, targets_of

SHOWN, OFTEN = 8, 20  # tokens that are shown, of those that were read so often


@torch.no_grad()
def writing(
    model: Module, documents: Sequence[Document], lanes: int
) -> tuple[np.ndarray, np.ndarray]:
    """What each layer's heads keep of a slot, a mean (L, H); the slots' weight on each token (V,), relative to the mean token's.

    Of all segments after a document's first whose tokens are all scored. A token that was read seldom has weight 0.
    """
    writers, calls = [module for module in model.modules() if isinstance(module, Writer)], []
    hooks = [writer.register_forward_hook(lambda *call: calls.append(call)) for writer in writers]
    kept, (weight, count), segments = 0.0, np.zeros((2, model.config.vocabulary)), 0
    for segment, number, state, _ in carried_through(model, documents, lanes, predict=False):
        rows = (number > 0) & segment.scored.numpy().all(1)
        weights = [
            writer.weights(memory, writer.norm(encoded), *others)
            for writer, (memory, encoded, *others), _ in calls
        ]
        weights = (
            torch.stack(weights, 1).float().cpu().numpy()[rows].astype(np.float64)
        )  # (b, L, H, S, 1 + N)
        calls.clear()
        kept, segments = kept + weights[..., 0].mean(-1).sum(0), segments + len(weights)
        tokens = (
            (state.previous if state.previous.numel() else segment.tokens)
            .cpu()
            .numpy()[rows]
            .flatten()
        )  # what was read
        np.add.at(weight, tokens, weights[..., 1:].mean((1, 2, 3)).flatten())
        np.add.at(count, tokens, 1)
    for hook in hooks:
        hook.remove()
    if not segments:
        raise InputError(
            "no document has two segments that are scored, so nothing is written; give longer documents (--data)"
        )
    mean = weight.sum() / count.sum()
    return kept / segments, np.where(count < OFTEN, 0.0, weight / np.maximum(count, 1) / mean)


def gradient_by_age(
    model: Module, documents: Sequence[Document], lanes: int, segments: int
) -> list[float]:
    """The norm of the gradient of a segment's loss at the memory 0 .. `segments` - 1 segments earlier, divided by the first.

    Of the longest documents, after as many segments that are read without gradient.
    """
    size, need = model.config.segment, 2 * segments * model.config.segment
    lengths = lengths_of(documents)
    chosen = [
        (number, 0, need)
        for number in np.argsort(-lengths, kind="stable")[:lanes].tolist()
        if lengths[number] >= need
    ]
    if not chosen:
        lack = f"no document has {need:,} tokens to predict"
        raise InputError(f"--segments {segments}: {lack}; give longer ones or a smaller number")
    device = next(model.parameters()).device
    read = [
        segment.to(device) for segment, _ in one_pass(Parts(documents, chosen), len(chosen), size)
    ]
    with evaluating(model):
        with torch.no_grad():
            state = model.initial_state(len(chosen))
            for segment in read[:segments]:
                state = model.advance(segment.tokens, state)
        memories = [state.memory.requires_grad_()]
        for segment in read[segments:]:
            reading = model.read(segment.tokens, state)
            state = reading.state
            memories.append(state.memory)
        loss = summed_nats(reading.hidden, model.output_matrix(), targets_of(segment))
    norms = [gradient.norm().item() for gradient in torch.autograd.grad(loss, memories[:-1])]
    if not norms[-1]:
        raise InputError(
            f"--segments {segments}: segment {2 * segments} has no scored token that memory changes; give another number"
        )
    return [norm / norms[-1] for norm in reversed(norms)]


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """What the slots keep and read, and the gradient by age of the memory."""
    read_by = (run.model, run.documents, run.lane_count)
    reach = gradient_by_age(*read_by, options.segments)  # says first if the documents are too short
    kept, weight = writing(*read_by)
    tokens = [
        (show_text(run.tokenizer, [number]), weight[number].item())
        for number in np.argsort(-weight)[:SHOWN]
    ]
    lines = [
        "what a slot keeps of itself in a segment, by head; and after how many segments half is left"
    ]
    for layer, heads in enumerate(kept.tolist(), start=1):
        cells = [
            f"{share:.3f} ({math.log(0.5) / math.log(share) if 0 < share < 1 else math.inf:.3g})"
            for share in heads
        ]
        lines.append(
            f"{f'layer {layer}' if len(kept) > 1 else 'all slots':<12}" + "   ".join(cells)
        )
    lines.append("tokens that slots read most, with their weight over the mean token's")
    lines.append("   ".join(f"{text!r} {times:.2f}" for text, times in tokens))
    lines.append(
        "the gradient of a segment's loss at the memory so many segments earlier, over that at its own"
    )
    lines.append("   ".join(f"{age}: {size:.2g}" for age, size in enumerate(reach)))
    return {"kept": kept.tolist(), "most_read": dict(tokens), "gradient_by_age": reach}, lines
