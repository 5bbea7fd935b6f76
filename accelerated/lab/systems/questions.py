"""The command `python -m accelerated.lab.systems.questions`: answers over several windows.

This is Table 3 of Adding Recurrence. A small RoBERTa is pretrained on the standard library, then
fine-tuned on generated questions of two hops, with disjoint windows and with recurrence. It prints
F1 and exact match as HotpotQA has them, in percent, and the exact match of parts of the answers.
"""

import copy
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from accelerated.data.config import default_data_dir
from accelerated.data.corpus import tokenised
from accelerated.data.sources import standard_library
from accelerated.data.tokenizers import Tokenizer, train_bpe
from accelerated.lab.harness import Experiment, add_part, conduct, parser_of
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.reader import Example
from accelerated.lab.systems.roberta import UNREAD, Roberta
from accelerated.program.errors import optional_package, run_program

ROWS = {"disjoint": False, "recurrent": True}  # {row: whether a vector goes from window to window}
SEGMENT = 24
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": SEGMENT + UNREAD,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VOCABULARY = 2048
PRETRAINING = (300, 64, 0.003)  # updates, batch, rate
UPDATES = (1000, 500)  # on short texts, then on those of the task
BATCH = 32
RATE = 0.002
QUESTIONS = (6400, 640)  # to train on, and asked
WINDOWS = (4, 8)  # least and most of a text of the task


def small_model(vocabulary: int) -> Roberta:
    """A small RoBERTa before its pretraining.

    RoBERTa's matrices begin at 0.02, which suits its width, 768; here they are larger, so that
    their outputs are as large. Positions begin as sinusoids, which so short a pretraining would not
    find.
    """
    transformers = optional_package("transformers", "this RoBERTa needs", "decoders")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.RobertaConfig(vocab_size=vocabulary, **SIZES)
        masked = transformers.RobertaForMaskedLM(config)
    width = SIZES["hidden_size"]
    half = width // 2
    angles = torch.arange(SEGMENT)[:, None] * 10_000 ** (-torch.arange(half) / half)
    embeddings = masked.roberta.embeddings
    with torch.no_grad():
        sinusoids = 0.02 * 2**0.5 * torch.cat([angles.sin(), angles.cos()], 1)
        embeddings.position_embeddings.weight[UNREAD:] = sinusoids
        for weight in masked.roberta.encoder.parameters():
            if weight.dim() == 2:
                weight *= (768 / width) ** 0.5
    return Roberta(masked, False)


class Task(NamedTuple):
    """What the rows are trained and asked on."""

    make: Callable[[bool, int], Roberta]  # a model with or without recurrence, by a seed
    stages: Sequence[tuple[list[Example], int]]  # training questions and updates, one after another
    asked: list[Example]
    batch: int
    rate: float


def task_examples(count: int, lines: Sequence[str], bpe: Tokenizer, seed: int) -> list[Example]:
    """Questions of two hops whose texts have as many windows as the task's."""
    least, most = WINDOWS
    questions = two_hops.drawn(2 * count, lines, seed)
    examples = [reader.cut(question, bpe, SEGMENT) for question in questions]
    return [each for each in examples if least <= len(each.tokens) <= most][:count]


@functools.cache
def make_task() -> Task:
    """The task in the small; its models begin from a pretrained one."""
    source = standard_library()
    lines, unseen = two_hops.prose()
    count, asked = QUESTIONS
    bpe = train_bpe(source, VOCABULARY)
    pretrained = small_model(reader.FIRST + bpe.vocabulary + 1)
    text = tokenised(source, bpe, default_data_dir()).splits["train"]
    tokens = text.tokens  # pyright: ignore  # of text, not of recall
    reader.pretrain(pretrained, tokens, SEGMENT, *PRETRAINING)

    def make(recurrent: bool, seed: int) -> Roberta:
        return Roberta(copy.deepcopy(pretrained.masked), recurrent, seed)

    questions = two_hops.drawn(count, lines, 3, (0, 1))
    short = [reader.cut(question, bpe, SEGMENT) for question in questions]
    examples = (short, task_examples(count, lines, bpe, 0))
    stages = list(zip(examples, UPDATES, strict=True))
    return Task(make, stages, task_examples(asked, unseen, bpe, 2), BATCH, RATE)


def scored(task: Task, row: str, seed: int) -> tuple[dict[str, float], list[str]]:
    """(F1, exact match and that of the answers' parts, in percent; the answers) of a row.

    They are those of a model that was trained on all stages of the task. Spans are parted by
    whether both hops are in one window.
    """
    model = task.make(ROWS[row], seed)
    for examples, updates in task.stages:
        how = (updates, task.batch, task.rate, seed)
        reader.fine_tune(model, examples, *how, f"{row}, seed {seed}")

    answers = [*reader.answers(model, task.asked)]
    found = {"F1": [], "exact match": []}
    for example, given in zip(task.asked, answers, strict=True):
        answer = example.question.answer
        right = two_hops.is_right(given, answer)
        part = "spans, hops apart" if example.distance else "spans, hops in one window"
        if answer in two_hops.KINDS:
            part = "yes or no"
        found["F1"].append(two_hops.f1(given, answer))
        found["exact match"].append(right)
        found.setdefault(part, []).append(right)
    return {name: 100 * statistics.mean(scores) for name, scores in found.items()}, answers


def said(run: dict) -> str:
    """The scores of a run, in a line."""
    return ", ".join(f"{name} {score:.1f}" for name, score in run.items() if name != "seconds")


def train(row: str, seed: int) -> dict:
    """The scores of a row with a seed."""
    return scored(make_task(), row, seed)[0]


def main(argv: list[str]) -> None:
    """Train and ask each row with each seed."""
    parser = parser_of("systems.questions", __doc__)
    add_part(parser)
    torch.set_num_threads(1)  # models so small are slower with more
    conduct(Experiment("questions", list(ROWS), SIZES, train, said), parser.parse(argv))


if __name__ == "__main__":
    run_program("questions", main, sys.argv[1:])
