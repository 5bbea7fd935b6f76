"""eval.py slots: what a Memformer's slots keep and read, and how far gradients reach back.

The weights are those of slot attention (Figure 2c): a slot's weight on itself is what it keeps, the
others are what it reads.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accelerated.data.lanes import Parts, one_pass
from accelerated.data.windows import Document, lengths_of
from accelerated.evaluation.sample import show_text
from accelerated.evaluation.score import Answer, TrainedRun, carried_through
from accelerated.memformer import Memformer, Writer
from accelerated.program.errors import InputError
from accelerated.protocol import evaluating
from accelerated.replay import segment_cross_entropy

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


def gradient_by_age(
    model: Memformer, documents: Sequence[Document], lanes: int, segments: int
) -> list[float]:
    """The norm of the gradient of a segment's loss at the memory 0 .. `segments` - 1 segments back.

    Norms are divided by the first. Of the longest documents, after as many segments that are read
    without gradient.
    """
    size = model.config.segment
    need = 2 * segments * size
    lengths = lengths_of(documents)
    longest = np.argsort(-lengths, kind="stable")[:lanes].tolist()
    spans = [(number, 0, need) for number in longest if lengths[number] >= need]
    lanes = len(spans)
    if not lanes:
        raise InputError(
            f"--segments {segments}: no document has {need:,} tokens to predict; "
            "give longer ones or a smaller number"
        )

    device = model.embedding.device
    beginnings = Parts(documents, spans)
    read = [segment.to(device) for segment, _ in one_pass(beginnings, lanes, size)]
    with evaluating(model):
        with torch.no_grad():
            state = model.initial_state(lanes)
            for segment in read[:segments]:
                state = model.advance(segment.tokens, state)
        memories = [state.memory.requires_grad_()]
        for segment in read[segments:]:
            reading = model.read(segment.tokens, state)
            state = reading.state
            memories.append(state.memory)
        loss = segment_cross_entropy(reading.hidden, model.output_matrix(), segment)
    norms = [gradient.norm().item() for gradient in torch.autograd.grad(loss, memories[:-1])]
    if not norms[-1]:
        raise InputError(
            f"--segments {segments}: "
            f"segment {2 * segments} has no scored token that memory changes; "
            "give another number"
        )
    return [norm / norms[-1] for norm in reversed(norms)]


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """What the slots keep and read, and the gradient by age of the memory."""
    assert isinstance(run.model, Memformer)
    reading = (run.model, run.documents, run.lane_count)
    reach = gradient_by_age(*reading, options.segments)  # says first if the documents are too short
    kept, weight = writing(*reading)

    lines = ["what a slot keeps of itself in a segment, by head"]
    for layer, heads in enumerate(kept.tolist(), start=1):
        name = f"layer {layer}" if len(kept) > 1 else "all slots"
        lines.append(f"{name:<12}" + "   ".join(f"{share:.3f}" for share in heads))
    most = np.argsort(-weight)[:SHOWN].tolist()
    most_read = [(show_text(run.tokenizer, [token]), weight[token].item()) for token in most]
    lines.append("tokens that slots read most, with their weight over the mean token's")
    lines.append("   ".join(f"{text!r} {times:.2f}" for text, times in most_read))
    lines.append(
        "the gradient of a segment's loss at the memory so many segments earlier, "
        "over that at its own"
    )
    lines.append("   ".join(f"{age}: {size:.2g}" for age, size in enumerate(reach)))
    return {"kept": kept.tolist(), "most_read": dict(most_read), "gradient_by_age": reach}, lines
