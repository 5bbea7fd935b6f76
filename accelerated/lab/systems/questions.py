"""The command `python -m accelerated.lab.systems.questions`: answers over several windows.

This is Table 3 of Adding Recurrence. A small RoBERTa is pretrained on the standard library, then
fine-tuned on generated questions of two hops, with disjoint windows and with recurrence.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.config import default_data_dir
from accelerated.data.corpus import tokenised
from accelerated.data.sources import standard_library
from accelerated.data.tokenizers import Tokenizer, train_bpe
from accelerated.lab.experiment import Curve, Experiment, conduct, draw_shares
from accelerated.lab.speed.timing import markdown_table
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.reader import Example
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.tables.page import laid_out, mean_and_spread, wrapped
from accelerated.program.errors import run_program
from reference.roberta import Config

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
    "pretraining": [300, 64, 0.003],  # updates, batch, rate
    "updates": [1000, 500],  # on short texts, then on those of the task
    "batch": 32,
    "rate": 0.002,
    "questions": [6400, 640],  # to train on, and asked
    "windows": [4, 8],  # least and most of a text of the task
}
PARTS = {  # {column: which answers, by the windows between the hops and whether it is a span}
    "spans, hops in one window": lambda distance, span: span and distance == 0,
    "spans, hops apart": lambda distance, span: span and distance > 0,
    "yes or no": lambda distance, span: not span,
}


def small_model(vocabulary: int, recurrent: bool, seed: int) -> Roberta:
    """A small RoBERTa before its pretraining.

    RoBERTa's matrices begin at 0.02, which suits its width, 768; here they are larger, so that
    their outputs are as large. Positions begin as sinusoids, which so short a pretraining would not
    find.
    """
    config = Config(vocabulary=vocabulary, recurrent=recurrent, **SIZES)
    model = Roberta(config, seed)
    half = SIZES["width"] // 2
    angles = torch.arange(SIZES["segment"])[:, None] * 10_000 ** (-torch.arange(half) / half)
    matrices = [weight for weight in model.layers.parameters() if weight.dim() == 2]
    with torch.no_grad():
        model.positions.copy_(0.02 * 2**0.5 * torch.cat([angles.sin(), angles.cos()], 1))
        for weight in matrices:
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
    fitting = []
    for question in two_hops.drawn(2 * count, lines, seed):
        example = reader.cut(question, bpe, SIZES["segment"])
        if least <= len(example.tokens) <= most:
            fitting.append(example)
    return fitting[:count]


@functools.cache
def task() -> Task:
    """The task and its pretrained model; a process makes them once."""
    source = standard_library()
    lines, unseen = two_hops.prose()
    count, asked = SMALL["questions"]
    bpe = train_bpe(source, SMALL["vocabulary"])
    vocabulary = reader.FIRST + bpe.vocabulary + 1
    pretrained = small_model(vocabulary, False, 0)
    text = tokenised(source, bpe, default_data_dir()).splits["train"]
    tokens = text.tokens  # pyright: ignore  # of text, not of recall
    reader.pretrain(pretrained, tokens, *SMALL["pretraining"])

    def model(recurrent: bool, seed: int) -> Roberta:
        """The pretrained weights; the seed draws those of the recurrence alone."""
        copy = small_model(vocabulary, recurrent, seed)
        copy.load_state_dict(pretrained.state_dict(), strict=False)
        return copy

    questions = two_hops.drawn(count, lines, 3, (0, 1))
    short = [reader.cut(question, bpe, SIZES["segment"]) for question in questions]
    examples = (short, task_examples(count, lines, bpe, 0))
    stages = list(zip(examples, SMALL["updates"], strict=True))
    return Task(model, stages, task_examples(asked, unseen, bpe, 2))


def trained(row: str, seed: int) -> Roberta:
    """A model of a row after all stages of the task."""
    model = task().model(ROWS[row], seed)
    title = f"{row}, seed {seed}"
    for examples, updates in task().stages:
        reader.fine_tune(model, examples, updates, SMALL["batch"], SMALL["rate"], seed, title)
    return model


def run(row: str, seed: int) -> dict:
    """What a row reaches with a seed.

    Of each answer the distance between the hops, whether it is a span, and exact match.
    """
    asked = task().asked
    scores = []
    rows = []
    for example, given in zip(asked, reader.answers(trained(row, seed), asked), strict=True):
        answer = example.question.answer
        scores.append(two_hops.f1(given, answer))
        right = int(two_hops.is_right(given, answer))
        rows.append([example.distance, answer not in two_hops.KINDS, right])
    exact = percent([right for _, _, right in rows])
    return {"f1": percent(scores), "exact match": exact, "answers": rows}


def said(run: dict) -> str:
    """What came out of a run, in a line."""
    return f"F1 {run['f1']:.1f}, exact match {run['exact match']:.1f}"


def percent(scores: Sequence[float]) -> float:
    """The mean in percent; NaN without any."""
    return 100 * sum(scores) / len(scores) if scores else math.nan


def share(run: dict, chosen: Callable[[int, bool], bool]) -> float:
    """Exact match in percent of a run's answers with a chosen (distance, is a span)."""
    return percent([right for distance, span, right in run["answers"] if chosen(distance, span)])


def spans_at(distance: int, run: dict) -> float:
    """Exact match in percent of a run's spans with so many windows between the hops."""
    return share(run, lambda own, span: span and own == distance)


def page(record: dict) -> str:
    """The page of a record, in Markdown."""
    table = []
    for row, by_seed in record["runs"].items():
        runs = by_seed.values()
        cells = [row, ", ".join(by_seed)]
        for score in ("f1", "exact match"):
            cells.append(mean_and_spread([run[score] for run in runs], ".1f"))
        for chosen in PARTS.values():
            cells.append(mean_and_spread([share(run, chosen) for run in runs], ".0f"))
        table.append(cells)
    title = "Does the vector carry what a question of two hops needs?"
    answer = "Yes: spans that need a fact of another window are right with it, guesses without."
    how = """. Numbers are means of the seeds (least..most), in percent. The columns behind exact
    match are its parts. The method and the questions are in the
    [chapter](../pretrained_recurrence.md#question-answering)."""
    numbers = markdown_table(["windows", "seeds", "F1", "exact match", *PARTS], *table)
    settings = wrapped(f"Settings: {json.dumps(record['settings'])}.")
    change = "Published weights, and questions that people asked."
    parts = (numbers, settings)
    return laid_out(record, title, NAME, "systems.questions", answer, how, change, *parts)


def draw(record: dict, path: Path) -> None:
    """Draw exact match on spans by the distance between the hops.

    A line is the mean of a row's seeds, a thin one each seed.
    """
    curves = {}
    for row, by_seed in record["runs"].items():
        runs = by_seed.values()
        found = set()
        for run in runs:
            found |= {distance for distance, span, _ in run["answers"] if span}
        distances = sorted(found)
        percentages = [[spans_at(distance, run) for run in runs] for distance in distances]
        curves[row] = Curve(distances, np.array(percentages), "o-")
    guess = 100 / len(two_hops.PLACES)
    label = "exact match on spans, percent"
    draw_shares(path, curves, guess, xlabel="windows between the hops", ylabel=label)


EXPERIMENT = Experiment(
    "systems.questions", __doc__, NAME, list(ROWS), SMALL, run, said, page, draw
)

if __name__ == "__main__":
    run_program("questions", conduct, EXPERIMENT, sys.argv[1:])
