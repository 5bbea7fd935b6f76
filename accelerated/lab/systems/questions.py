"""The command `python -m accelerated.lab.systems.questions`: answers over several windows.

This is Table 3 of Adding Recurrence. A small RoBERTa is pretrained on the standard library, then
fine-tuned on generated questions of two hops, with disjoint windows and with recurrence. It prints
F1 and exact match as HotpotQA has them, in percent, and the exact match of parts of the answers.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from accelerated.data.config import default_data_dir
from accelerated.data.corpus import tokenised
from accelerated.data.sources import standard_library
from accelerated.data.tokenizers import Tokenizer, train_bpe
from accelerated.lab.harness import SEEDS, add_seeds, parser_of
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.reader import Example
from accelerated.lab.systems.roberta import Config, Roberta
from accelerated.program.errors import run_program
from accelerated.program.progress import Progress

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
VOCABULARY = 2048
PRETRAINING = (300, 64, 0.003)  # updates, batch, rate
UPDATES = (1000, 500)  # on short texts, then on those of the task
BATCH = 32
RATE = 0.002
QUESTIONS = (6400, 640)  # to train on, and asked
WINDOWS = (4, 8)  # least and most of a text of the task
# Parts of the answers: spans, by whether both hops are in one window, and the others
TOGETHER = "spans, hops in one window"
APART = "spans, hops apart"
YES_OR_NO = "yes or no"
PARTS = (TOGETHER, APART, YES_OR_NO)


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

    pretrained: Roberta  # without recurrence
    stages: Sequence[tuple[list[Example], int]]  # training questions and updates, one after another
    asked: list[Example]


def task_examples(count: int, lines: Sequence[str], bpe: Tokenizer, seed: int) -> list[Example]:
    """Questions of two hops whose texts have as many windows as the task's."""
    least, most = WINDOWS
    fitting = []
    for question in two_hops.drawn(2 * count, lines, seed):
        example = reader.cut(question, bpe, SIZES["segment"])
        if least <= len(example.tokens) <= most:
            fitting.append(example)
    return fitting[:count]


def make_task() -> Task:
    """The task and its pretrained model."""
    source = standard_library()
    lines, unseen = two_hops.prose()
    count, asked = QUESTIONS
    bpe = train_bpe(source, VOCABULARY)
    pretrained = small_model(reader.FIRST + bpe.vocabulary + 1, False, 0)
    text = tokenised(source, bpe, default_data_dir()).splits["train"]
    tokens = text.tokens  # pyright: ignore  # of text, not of recall
    reader.pretrain(pretrained, tokens, *PRETRAINING)

    questions = two_hops.drawn(count, lines, 3, (0, 1))
    short = [reader.cut(question, bpe, SIZES["segment"]) for question in questions]
    examples = (short, task_examples(count, lines, bpe, 0))
    stages = list(zip(examples, UPDATES, strict=True))
    return Task(pretrained, stages, task_examples(asked, unseen, bpe, 2))


def scored(task: Task, row: str, seed: int) -> list[float]:
    """F1 and exact match of a row's answers, and the exact match of each of PARTS, in percent.

    They are those of a model that was trained on all stages of the task.
    """
    pretrained, stages, asked = task
    model = small_model(pretrained.config.vocabulary, ROWS[row], seed)
    weights = pretrained.state_dict()  # the seed draws those of the recurrence alone
    model.load_state_dict(weights, strict=False)
    title = f"{row}, seed {seed}"
    for examples, updates in stages:
        reader.fine_tune(model, examples, updates, BATCH, RATE, seed, title)

    pairs = []
    right = {part: [] for part in PARTS}
    for example, given in zip(asked, reader.answers(model, asked), strict=True):
        answer = example.question.answer
        part = APART if example.distance else TOGETHER
        if answer in two_hops.KINDS:
            part = YES_OR_NO
        pairs.append((given, answer))
        right[part].append(two_hops.is_right(given, answer))
    exact = [two_hops.percent(of_part) for of_part in right.values()]
    return [*two_hops.scores(pairs), *exact]


def main(argv: list[str]) -> None:
    """Train and ask each row with each seed; print a line for each."""
    parser = parser_of("systems.questions", __doc__)
    add_seeds(parser, SEEDS, "0 1 2")
    options = parser.parse(argv)
    torch.set_num_threads(1)  # models so small are slower with more
    Progress.say(" | ".join(["windows", "seed", "F1", "exact match", *PARTS]))
    task = make_task()
    for seed, row in itertools.product(options.seeds, ROWS):
        cells = [f"{score:.1f}" for score in scored(task, row, seed)]
        Progress.say(" | ".join([row, str(seed), *cells]))


if __name__ == "__main__":
    run_program("questions", main, sys.argv[1:])
