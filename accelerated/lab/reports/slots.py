"""eval.py slots: what a Memformer's slots keep of themselves; the rest is what they read.

The weights are those of slot attention (Figure 2c).
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from accelerated.data.windows import Document
from accelerated.evaluation.score import Answer, TrainedRun, carried_through
from accelerated.memformer import Memformer, Writer
from accelerated.program.errors import InputError


@torch.no_grad()
def shares_kept(model: Memformer, documents: Sequence[Document], lanes: int) -> Tensor:
    """What each layer's heads keep of a slot in a segment, a mean (L, H).

    It is of all segments after a document's first whose tokens are all scored.
    """
    kept = []  # of the segment that is read, by layer: (B, H)

    def watch(writer: Writer, given: tuple, _: Tensor) -> None:
        memory, encoded, *others = given
        weights = writer.weights(memory, writer.norm(encoded), *others)  # (B, H, S, 1 + N)
        kept.append(weights[..., 0].mean(-1))

    writers = [module for module in model.modules() if isinstance(module, Writer)]
    hooks = [writer.register_forward_hook(watch) for writer in writers]
    found = []
    for segment, number, _, _ in carried_through(model, documents, lanes, predict=False):
        rows = torch.from_numpy(number > 0) & segment.scored.all(1)
        found.append(torch.stack(kept, 1).cpu()[rows])  # (b, L, H)
        kept.clear()
    for hook in hooks:
        hook.remove()
    of_segments = torch.cat(found)
    if not len(of_segments):
        raise InputError(
            "no document has two segments that are scored, so nothing is written; "
            "give longer documents (--data)"
        )
    return of_segments.mean(0)


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """What the slots keep."""
    assert isinstance(run.model, Memformer)
    kept = shares_kept(run.model, run.documents, run.lane_count).tolist()
    lines = ["what a slot keeps of itself in a segment, by head; the rest it reads"]
    for layer, heads in enumerate(kept, start=1):
        name = f"layer {layer}" if len(kept) > 1 else "all slots"
        lines.append(f"{name:<12}" + "   ".join(f"{share:.3f}" for share in heads))
    return {"kept": kept}, lines
