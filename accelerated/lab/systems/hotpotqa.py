"""The command `python -m accelerated.lab.systems.hotpotqa`: Table 3 of Adding Recurrence itself.

A published RoBERTa is fine-tuned on HotpotQA's questions, with disjoint windows and with
recurrence. The files are yours: --init is RoBERTa's folder, --train and --asked are
hotpot_train_v1.1.json and hotpot_dev_distractor_v1.json. Answers are written as HotpotQA's own
evaluation reads them. What is written is not trained again, so the same command continues.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from accelerated.data.tokenizers import Tokenizer, tokenizer_of_file
from accelerated.lab.harness import ADVICE, add_seeds, parser_of, read_record, write_record
from accelerated.lab.speed.timing import print_table
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.questions import ROWS
from accelerated.lab.systems.reader import Example
from accelerated.lab.systems.roberta import Config
from accelerated.lab.systems.roberta_weights import EXPECTED, described_config, load_roberta
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
    add = parser.add_argument
    for name, what in (("--init", "FOLDER"), ("--train", "FILE"), ("--asked", "FILE")):
        add(name, type=Path, required=True, metavar=what)
    add_seeds(parser, [0], "0")
    add("--out", type=Path, default=Path("runs/hotpotqa"), help="(default runs/hotpotqa)")
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


def open_vocabulary(folder: Path, config: Config) -> Tokenizer:
    """The tokenizer of a RoBERTa's folder; raises InputError if it is another model's."""
    has_merges = (folder / "vocab.json").exists() and (folder / "merges.txt").exists()
    bpe = tokenizer_of_file(folder / ("vocab.json" if has_merges else "tokenizer.json"), EXPECTED)
    if bpe.spellings[:3] != SPECIAL or bpe.vocabulary > config.vocabulary:
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


def main(argv: list[str]) -> None:
    """Train and ask what is missing; print F1 and exact match of each row and seed."""
    options = parse_options(argv)
    config = described_config(options.init, SEGMENT)
    bpe = open_vocabulary(options.init, config)
    asked = read_questions(options.asked)
    training = chosen(read_questions(options.train))
    options.out.mkdir(parents=True, exist_ok=True)
    # what all files of a folder must have in common
    settings = {"init": str(options.init), "train": str(options.train)}
    files = {}
    for seed, row in itertools.product(options.seeds, ROWS):
        files[row, seed] = options.out / f"answers-{row}-{seed}.json"
    # others' are refused before anything is trained
    scored = {file: scores(file, asked, settings) for file in files.values() if file.exists()}
    examples = cut_all(training, bpe)
    asked_examples = cut_all(asked.values(), bpe)
    updates = math.ceil(EPOCHS * len(examples) / BATCH)

    table = [("windows", "seed", "F1", "exact match")]
    for (row, seed), file in files.items():
        if not file.exists():
            model = load_roberta(options.init, replace(config, recurrent=ROWS[row]), seed)
            model.to(choose_device("auto"))
            title = f"{row}, seed {seed}"
            reader.fine_tune(model, examples, updates, BATCH, RATE, seed, title)
            answers = dict(zip(asked, reader.answers(model, asked_examples), strict=True))
            # as HotpotQA's evaluation reads it, without supporting facts
            write_record(file, {"answer": answers, "sp": {}, "settings": settings})
            scored[file] = scores(file, asked, settings)
        table.append((row, seed, *scored[file]))
    print_table(*table)


def scores(file: Path, asked: dict[str, Question], settings: dict) -> tuple[str, str]:
    """(F1, exact match), in percent, of a file of answers.

    Raises InputError if it is damaged, or was written for other questions, or with other options.
    """
    content = read_record(file, {"answer"})
    answers = content["answer"]
    if content.get("settings") != settings or answers.keys() != asked.keys():
        raise InputError(f"{file} is of other options or questions; {ADVICE}")
    pairs = [(answers[name], question.answer) for name, question in asked.items()]
    of_words, exact = two_hops.scores(pairs)
    return f"{of_words:.2f}", f"{exact:.2f}"


if __name__ == "__main__":
    run_program("hotpotqa", main, sys.argv[1:])
