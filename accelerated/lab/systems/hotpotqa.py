"""The command `python -m accelerated.lab.systems.hotpotqa`: Table 3 of Adding Recurrence itself.

A published RoBERTa is fine-tuned on HotpotQA's questions, with disjoint windows and with
recurrence. The files are yours: --init is RoBERTa's folder, --train and --asked are
hotpot_train_v1.1.json and hotpot_dev_distractor_v1.json. Answers are written as HotpotQA's own
evaluation reads them. What is in the record is not trained again, so the same command continues.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np

from accelerated.data.tokenizers import Tokenizer, tokenizer_of_file
from accelerated.lab.harness import Experiment, add_part, conduct, parser_of, write_record
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.questions import ROWS
from accelerated.lab.systems.reader import Example
from accelerated.lab.systems.roberta import EXPECTED, load_roberta
from accelerated.lab.systems.two_hops import KINDS, Question
from accelerated.program.errors import InputError, counted, run_program
from accelerated.program.files import regular
from accelerated.program.progress import Progress
from accelerated.training.process import choose_device

FORM = "expected a list of {_id, question, answer, supporting_facts, context}, as HotpotQA's"
SPECIAL = [b"<s>", b"<pad>", b"</s>"]  # the ids reader.CLS, PAD and SEP
QUESTIONS = 30_000  # drawn to train on
EPOCHS = 4
BATCH = 8
RATE = 2e-5
SEGMENT = 512  # tokens of a window


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line."""
    parser = parser_of("systems.hotpotqa", __doc__)
    for name, what in (("--init", "FOLDER"), ("--train", "FILE"), ("--asked", "FILE")):
        parser.add_argument(name, type=Path, required=True, metavar=what)
    add_part(parser)
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
    if not (text and item["answer"]):
        raise ValueError("its context or its answer is empty")
    question = str(item["question"])
    f"{text}{question}".encode()  # half a surrogate pair, which JSON can hold, raises ValueError
    return Question(question, text, str(item["answer"]), tuple(hops))


def read_questions(path: Path) -> dict[str, Question]:
    """{its _id: question} of a file of HotpotQA; raises InputError if it is none."""
    at = "it"
    try:
        questions = {}
        for number, item in enumerate(json.loads(regular(path).read_bytes()), start=1):
            at = f"question {number}"
            name = str(item["_id"])
            question = question_of(item)
            if name in questions:
                raise ValueError(f"an earlier one has its _id, {name}")
            questions[name] = question
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {FORM}") from None
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        kind = type(error).__name__
        raise InputError(f"{path}: {at} cannot be read ({kind}: {error}); {FORM}") from None
    if not questions:
        raise InputError(f"{path} has no question; {FORM}")
    return questions


def open_vocabulary(folder: Path, vocabulary: int) -> Tokenizer:
    """The tokenizer of a RoBERTa's folder; raises InputError if it is another model's."""
    has_merges = (folder / "vocab.json").exists() and (folder / "merges.txt").exists()
    bpe = tokenizer_of_file(folder / ("vocab.json" if has_merges else "tokenizer.json"), EXPECTED)
    if bpe.spellings[:3] != SPECIAL or bpe.vocabulary > vocabulary:
        raise InputError(f"{bpe.name} is not this RoBERTa's vocabulary; {EXPECTED}")
    return bpe


def chosen(questions: dict[str, Question]) -> list[Question]:
    """QUESTIONS of them to train on, always the same, without those that no span answers.

    Raises InputError if that leaves none.
    """
    answered = []
    for question in questions.values():
        if question.answer in KINDS or reader.answer_start(question) >= 0:
            answered.append(question)
    if not answered:
        raise InputError("no text of --train has its question's answer; give another file")
    left_out = len(questions) - len(answered)
    if left_out:
        print(f"{counted(left_out, 'question')} without their answer in the text are left out")
    order = np.random.default_rng(0).permutation(len(answered))[:QUESTIONS]
    return [answered[number] for number in order]


def cut_all(questions: Collection[Question], bpe: Tokenizer) -> list[Example]:
    """The Examples of questions, in RoBERTa's own ids."""
    bar = Progress("cutting", len(questions), "question", over=questions)
    return [reader.cut(question, bpe, SEGMENT, first=0) for question in bar]


def experiment_of(options: argparse.Namespace) -> Experiment:
    """What the files of a command line train and ask."""
    asked = read_questions(options.asked)
    drawn = chosen(read_questions(options.train))

    @functools.cache
    def examples() -> tuple[list[Example], list[Example]]:
        model = load_roberta(options.init, SEGMENT, False, 0)
        bpe = open_vocabulary(options.init, model.masked.config.vocab_size)
        return cut_all(drawn, bpe), cut_all(asked.values(), bpe)

    def train(row: str, seed: int) -> dict:
        training, asked_examples = examples()
        model = load_roberta(options.init, SEGMENT, ROWS[row], seed)
        model.to(choose_device("auto"))
        updates = math.ceil(EPOCHS * len(training) / BATCH)
        reader.fine_tune(model, training, updates, BATCH, RATE, seed, f"{row}, seed {seed}")
        answers = dict(zip(asked, reader.answers(model, asked_examples), strict=True))
        # as HotpotQA's evaluation reads it, without supporting facts
        file = options.out / f"answers-{row}-{seed}.json"
        write_record(file, {"answer": answers, "sp": {}})
        pairs = [(answers[name], question.answer) for name, question in asked.items()]
        return two_hops.scores(pairs)

    settings = {name: str(getattr(options, name)) for name in ("init", "train", "asked")}
    return Experiment("hotpotqa", list(ROWS), settings, train, two_hops.said)


def main(argv: list[str]) -> None:
    """Train and ask what is missing; print F1 and exact match of each row and seed."""
    options = parse_options(argv)
    conduct(experiment_of(options), options)


if __name__ == "__main__":
    run_program("hotpotqa", main, sys.argv[1:])
