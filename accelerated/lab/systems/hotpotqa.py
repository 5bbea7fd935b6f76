"""The command `python -m accelerated.lab.systems.hotpotqa`: Table 3 of Adding Recurrence itself.

A published RoBERTa is fine-tuned on HotpotQA's questions, with disjoint windows and with
recurrence. The files are yours: --init is RoBERTa's folder, --train and --asked are
hotpot_train_v1.1.json and hotpot_dev_distractor_v1.json. What is in the record is not trained
again, so the same command continues.
"""

import argparse
import functools
import json
import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from accelerated.data.tokenizers import Tokenizer, tokenizer_of_file
from accelerated.lab.harness import Experiment, conduct, part_parser, run_command
from accelerated.lab.systems import reader
from accelerated.lab.systems.questions import ROWS, Task, said, scored
from accelerated.lab.systems.reader import Example
from accelerated.lab.systems.roberta import EXPECTED, load_roberta
from accelerated.lab.systems.two_hops import KINDS, Question
from accelerated.program.errors import InputError
from accelerated.training.process import choose_device

FORM = "expected a list of {_id, question, answer, supporting_facts, context}, as HotpotQA's"
QUESTIONS = 30_000  # drawn to train on
EPOCHS = 4
BATCH = 8
RATE = 2e-5
SEGMENT = 512  # tokens of a window


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line."""
    parser = part_parser("systems.hotpotqa", __doc__)
    for name, what in (("--init", "FOLDER"), ("--train", "FILE"), ("--asked", "FILE")):
        parser.add_argument(name, type=Path, required=True, metavar=what)
    return parser.parse(argv)


def question_of(item: dict) -> Question:
    """A question of HotpotQA: its text is each paragraph's title, a line, and its sentences."""
    wanted = {(title, number) for title, number in item["supporting_facts"]}
    text = ""
    hops = []
    for title, sentences in item["context"]:
        text += f"{title}\n"
        for number, sentence in enumerate(sentences):
            if (title, number) in wanted:
                hops.append((len(text), len(text) + len(sentence)))
            text += sentence
        text += "\n"
    return Question(item["question"], text, item["answer"], tuple(hops))


def read_questions(path: Path) -> dict[str, Question]:
    """{its _id: question} of a file of HotpotQA; raises InputError if it is none."""
    questions = {}
    try:
        for item in json.loads(path.read_bytes()):
            questions[str(item["_id"])] = question_of(item)
    except (KeyError, TypeError, ValueError) as error:
        at = f"{path}, question {len(questions) + 1}"
        kind = type(error).__name__
        raise InputError(f"{at}, cannot be read ({kind}: {error}); {FORM}") from None
    if not questions:
        raise InputError(f"{path} has no question; {FORM}")
    return questions


def chosen(questions: dict[str, Question]) -> list[Question]:
    """QUESTIONS of them to train on, always the same, without those that no span answers."""
    answered = []
    for question in questions.values():
        if question.answer in KINDS or reader.answer_start(question) >= 0:
            answered.append(question)
    order = np.random.default_rng(0).permutation(len(answered))[:QUESTIONS]
    return [answered[number] for number in order]


def cut_all(questions: Collection[Question], bpe: Tokenizer) -> list[Example]:
    """The Examples of questions, in RoBERTa's own ids."""
    return [reader.cut(question, bpe, SEGMENT, first=0) for question in questions]


def experiment_of(options: argparse.Namespace) -> Experiment:
    """What the files of a command line train and ask."""
    asked = read_questions(options.asked)
    training = chosen(read_questions(options.train))

    def make(recurrent: bool, seed: int) -> reader.Roberta:
        return load_roberta(options.init, recurrent, seed).to(choose_device("auto"))

    @functools.cache
    def task() -> Task:
        bpe = tokenizer_of_file(options.init / "vocab.json", EXPECTED)
        examples = cut_all(training, bpe)
        updates = math.ceil(EPOCHS * len(examples) / BATCH)
        return Task(make, [(examples, updates)], cut_all(asked.values(), bpe), BATCH, RATE)

    settings = {name: str(getattr(options, name)) for name in ("init", "train", "asked")}
    return Experiment("hotpotqa", ROWS, settings, functools.partial(scored, task), said)


def main(argv: list[str]) -> None:
    """Train and ask what is missing; print F1 and exact match of each row and seed."""
    options = parse_options(argv)
    conduct(experiment_of(options), options)


if __name__ == "__main__":
    run_command("hotpotqa", main)
