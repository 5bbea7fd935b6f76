"""The command `python -m accelerated.lab.systems.questions`: answers over several windows, Table 3 of Adding Recurrence.

A small RoBERTa is pretrained on the standard library, then fine-tuned on generated questions of two hops, with disjoint windows
and with recurrence.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.config import default_data_dir
from accelerated.data.corpus import tokenised
from accelerated.data.sources import standard_library
from accelerated.data.tokenizers import Tokenizer, train_bpe
from accelerated.lab.experiment import Experiment, conduct, draw_shares
from accelerated.lab.speed.timing import markdown_table
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.reader import Example
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.tables.page import laid_out, mean_and_spread, wrapped
from accelerated.program.errors import run_program

NAME = "pretrained_recurrence-3"
ROWS = {"disjoint": False, "recurrent": True}  # {row: whether a vector goes from window to window}
SIZES = {
    "width": 64,
    "layers": 2,
    "heads": 4,
    "feed_forward": 256,
    "segment": 24,
    "module_width": 64,
    "dropout": 0.0,
}
SMALL = {
    "sizes": SIZES,
    "vocabulary": 2048,
    "pretraining": [300, 64, 0.003],
}  # updates, batch, rate
SMALL |= {
    "updates": [1000, 500],
    "batch": 32,
    "rate": 0.002,
}  # updates on short texts, then on those of the task
SMALL |= {
    "questions": [6400, 640],
    "windows": [4, 8],
}  # to train on, and asked; least and most of a text of the task
PARTS = {  # {column: which answers, by the windows between the hops and whether it is a span}
    "spans, hops in one window": lambda distance, span: span and distance == 0,
    "spans, hops apart": lambda distance, span: span and distance > 0,
    "yes or no": lambda distance, span: not span,
}


def small_model(vocabulary: int, recurrent: bool, seed: int) -> Roberta:
    """A small RoBERTa before its pretraining.

    RoBERTa's matrices begin at 0.02, which suits its width, 768; here they are larger, so that their outputs are as large.
    Positions begin as sinusoids, which so short a pretraining would not find.
    """
    model = Roberta(Roberta.Config(vocabulary=vocabulary, recurrent=recurrent, **SIZES), seed)
    half = SIZES["width"] // 2
    angles = torch.arange(SIZES["segment"])[:, None] * 10_000 ** (-torch.arange(half) / half)
    with torch.no_grad():
        model.positions.copy_(0.02 * 2**0.5 * torch.cat([angles.sin(), angles.cos()], 1))
        for weight in (weight for weight in model.layers.parameters() if weight.dim() == 2):
            weight *= (768 / SIZES["width"]) ** 0.5
    return model


class Task(NamedTuple):
    """What the rows are trained and asked on."""

    model: Callable[[bool, int], Roberta]  # (recurrent, seed) to a pretrained model
    stages: list[tuple[list[Example], int]]  # training questions and updates, one after another
    asked: list[Example]


def task_examples(count: int, lines: Sequence[str], bpe: Tokenizer, seed: int) -> list[Example]:
    """Questions of two hops whose texts have as many windows as the task's."""
    least, most = SMALL["windows"]
    examples = (
        reader.cut(question, bpe, SIZES["segment"])
        for question in two_hops.drawn(2 * count, lines, seed)
    )
    return list(
        islice((example for example in examples if least <= len(example.tokens) <= most), count)
    )


@functools.cache
def task() -> Task:
    """The task and its pretrained model; a process makes them once."""
    source, (lines, unseen), (count, asked) = (
        standard_library(),
        two_hops.prose(),
        SMALL["questions"],
    )
    bpe = train_bpe(source, SMALL["vocabulary"])
    vocabulary = reader.FIRST + bpe.vocabulary + 1
    first = small_model(vocabulary, False, 0)
    reader.pretrain(
        first,
        tokenised(source, bpe, default_data_dir()).splits["train"].tokens,
        *SMALL["pretraining"],
    )

    def model(recurrent: bool, seed: int) -> Roberta:
        """The pretrained weights; the seed draws those of the recurrence alone."""
        copy = small_model(vocabulary, recurrent, seed)
        copy.load_state_dict(first.state_dict(), strict=False)
        return copy

    short = [
        reader.cut(question, bpe, SIZES["segment"])
        for question in two_hops.drawn(count, lines, 3, (0, 1))
    ]
    stages = list(zip((short, task_examples(count, lines, bpe, 0)), SMALL["updates"], strict=True))
    return Task(model, stages, task_examples(asked, unseen, bpe, 2))


def trained(row: str, seed: int) -> Roberta:
    """A model of a row after all stages of the task."""
    model = task().model(ROWS[row], seed)
    for examples, updates in task().stages:
        reader.fine_tune(
            model, examples, updates, SMALL["batch"], SMALL["rate"], seed, f"{row}, seed {seed}"
        )
    return model


def run(row: str, seed: int) -> dict:
    """What a row reaches with a seed; of each answer the distance between the hops, whether it is a span, and exact match."""
    asked, scores, rows = task().asked, [], []
    for example, given in zip(asked, reader.answers(trained(row, seed), asked), strict=True):
        answer = example.question.answer
        scores.append(two_hops.f1(given, answer))
        right = two_hops.normalised(given) == two_hops.normalised(answer)
        rows.append([example.distance, answer not in two_hops.KINDS, int(right)])
    return {
        "f1": percent(scores),
        "exact match": percent([right for *_, right in rows]),
        "answers": rows,
    }


def said(run: dict) -> str:
    """What came out of a run, in a line."""
    return f"F1 {run['f1']:.1f}, exact match {run['exact match']:.1f}"


def percent(scores: Sequence[float]) -> float:
    """The mean in percent; NaN without any."""
    return 100 * sum(scores) / len(scores) if scores else math.nan


def share(run: dict, chosen: Callable[[int, bool], bool]) -> float:
    """Exact match in percent of a run's answers with a chosen (distance, is a span)."""
    return percent([right for distance, span, right in run["answers"] if chosen(distance, span)])


def page(record: dict) -> str:
    """The page of a record, in Markdown."""
    table = []
    for row, runs in record["runs"].items():
        whole = (
            mean_and_spread([run[score] for run in runs.values()], ".1f")
            for score in ("f1", "exact match")
        )
        parts = (
            mean_and_spread([share(run, chosen) for run in runs.values()], ".0f")
            for chosen in PARTS.values()
        )
        table.append([row, ", ".join(runs), *whole, *parts])
    how = """. Mean (least .. most) of the seeds, in percent; the columns behind exact match are its parts. The method and the
    questions are in the [chapter](../pretrained_recurrence.md#question-answering)."""
    parts = [f"![exact match by the distance between the hops]({NAME}.svg)"]
    parts += [markdown_table(["windows", "seeds", "F1", "exact match", *PARTS], *table)]
    parts += [wrapped(f"Settings: {json.dumps(record['settings'])}.")]
    return laid_out(
        record,
        "Adding Recurrence, Table 3: question answering",
        "systems.questions",
        "",
        how,
        *parts,
    )


def draw(record: dict, path: Path) -> None:
    """Draw exact match on spans by the distance between the hops: the mean of a row's seeds, and each seed as a thin line."""
    curves, labels = (
        {},
        {"xlabel": "windows between the hops", "ylabel": "exact match on spans, percent"},
    )
    for row, runs in record["runs"].items():
        distances = sorted(
            {distance for run in runs.values() for distance, span, _ in run["answers"] if span}
        )
        shares = [
            [share(run, lambda d, span, at=at: span and d == at) for run in runs.values()]
            for at in distances
        ]
        curves[row] = distances, np.array(shares), "o-"
    draw_shares(path, curves, guess=100 / len(two_hops.PLACES), **labels)


EXPERIMENT = Experiment(
    "systems.questions", __doc__, NAME, list(ROWS), SMALL, run, said, page, draw
)

if __name__ == "__main__":
    run_program("questions", conduct, EXPERIMENT, sys.argv[1:])
