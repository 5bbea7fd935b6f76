"""The table `overlaps`: what evaluating plain GPT-2 costs at several overlaps of its windows."""

import statistics
from argparse import Namespace
from dataclasses import replace

import numpy as np

from accelerated.bench.sizes import sizes_line
from accelerated.bench.timing import Variant, paired_ratios, print_table, spread, time_in_turn
from accelerated.data.windows import Document
from accelerated.evaluation.score import evaluate
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.training.process import autocast

OVERLAPS = (0, 5, 10, 30, 50, 96)
LENGTHS = (40_000, 9_000, 2_000)  # tokens of the documents that are read


class Tokens:
    """A tokenizer of so many tokens, a byte each."""

    def __init__(self, vocabulary: int):
        self.token_bytes = np.ones(vocabulary, int)


def random_document(length: int, vocabulary: int) -> Document:
    """A document of random tokens, all but the first of them scored."""
    text = np.random.default_rng(length).integers(vocabulary, size=length + 1)
    return Document(str(length), text[:-1], text[1:], np.ones(length, bool))


def overlap_variant(config, documents: list[Document], options: Namespace) -> Variant:
    """Evaluating documents with plain GPT-2 at config's overlap."""
    model, tokenizer = PretrainedRecurrence(config).to(options.device), Tokens(config.vocabulary)

    def step():
        with autocast(options.dtype, options.device):
            evaluate(model, documents, tokenizer, options.batch)

    return Variant(f"overlap {config.overlap}", step, sum(LENGTHS), None)


def report(options: Namespace) -> None:
    """Print the time at each overlap o, over that of overlap 0, and that over T / (T - o)."""
    plain = replace(options.config, vectors=0)
    documents = [random_document(length, plain.vocabulary) for length in LENGTHS]
    overlaps = [overlap for overlap in OVERLAPS if overlap < plain.segment]
    variants = [overlap_variant(replace(plain, overlap=overlap), documents, options) for overlap in overlaps]
    times = time_in_turn(variants, options.repeats, options.device)
    print(f"plain GPT-2, {sizes_line(plain, options.batch)}; documents of {', '.join(f'{n:,}' for n in LENGTHS)} tokens")
    rows = [("overlap", "seconds", "of overlap 0", "T / (T - o)", "over it")]
    for overlap, variant in zip(overlaps, variants, strict=True):
        ratios = paired_ratios(times[variant.name], times["overlap 0"])
        windows = plain.segment / (plain.segment - overlap)
        over = f"{statistics.median(ratios) / windows:.3f}"
        rows.append((str(overlap), spread(times[variant.name], ".2f"), spread(ratios, ".3f"), f"{windows:.3f}", over))
    print_table(*rows)
