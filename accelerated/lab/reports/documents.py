"""eval.py documents: the score of each document, for intervals that cover other documents."""

import argparse

import numpy as np

from accelerated.evaluation.score import Answer, Score, TrainedRun, token_nats


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """The bits per byte of each document that has something to predict."""
    of_parts = token_nats(run.model, run.documents, run.lane_count, options.clear_memory)
    nats_of = run.by_document(of_parts)
    rows = []
    lines = ["bits per byte   bytes predicted   document"]
    for document, nats in zip(run.splits[run.split], nats_of, strict=True):
        scored = ~np.isnan(nats)
        if not scored.any():
            continue
        text_bytes = int(run.tokenizer.token_bytes[document.targets[scored]].sum())
        score = Score(float(nats[scored].sum()), text_bytes=text_bytes)
        row = {"nats": score.nats, "text_bytes": text_bytes, "bits_per_byte": score.bits_per_byte}
        rows.append({"name": document.name} | row)
        lines.append(f"{score.bits_per_byte:13.4f}   {text_bytes:15,d}   {document.name}")
    return {"documents": rows}, lines
