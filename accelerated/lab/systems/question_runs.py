"""The command `python -m accelerated.lab.systems.question_runs`: answers over several windows, Table 3 of Adding Recurrence.

A small RoBERTa is pretrained on the standard library, then fine-tuned on generated questions of two hops, with disjoint windows
and with recurrence. With --train, --dev and --roberta it is RoBERTa itself on HotpotQA's files, with the paper's settings. On
seed 0 each rate is tried, and validation chooses; the other seeds take the chosen one.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.config import default_data_dir
from accelerated.data.corpus import tokenised
from accelerated.data.sources import standard_library
from accelerated.data.tokenizers import train_bpe
from accelerated.lab.experiment import Experiment, conduct, experiment_parser, parsed
from accelerated.lab.markdown import markdown_table
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.questions import KINDS, exact_match, mean_scores, read_questions
from accelerated.lab.systems.roberta import Roberta, load_published, published_config
from accelerated.lab.systems.roberta_tokens import RobertaTokenizer, of_bpe, published_tokenizer
from accelerated.lab.tables.page import mean_and_spread, wrapped
from accelerated.program.errors import InputError, run_program
from accelerated.program.files import file_checksum
from accelerated.program.progress import Progress
from accelerated.training.log import figure_class, new_figure, save_figure
from accelerated.training.process import choose_device
from accelerated.training.settings import DEVICES

ROWS = {"disjoint": False, "recurrent": True}  # {row: whether a vector goes from window to window}
SIZES = {"width": 64, "layers": 2, "heads": 4, "feed_forward": 256, "segment": 24, "module_width": 64, "dropout": 0.0}
VOCABULARY = 2048  # tokens of the BPE that is learned
ROBERTAS_WIDTH = 768
PRETRAINING = reader.Training(updates=300, batch=64, learning_rate=0.003)
SHORT, LONG, BATCH, RATES = 1000, 500, 32, (0.002, 0.003)  # updates on short texts, then on those of the task
QUESTIONS = {"train": 6400, "valid": 320, "test": 640}
WINDOWS = (4, 8)  # least and most of a text, except of the short ones
PAPERS = {"rate": 2e-5, "epochs": 4, "questions": 30_000, "batch": 32}  # section 5.4, which does not give the batch
ABOUT = f"""A small RoBERTa ({SIZES["layers"]} layers of width {SIZES["width"]}, windows of {SIZES["segment"]} tokens) is
pretrained by masked tokens of the standard library. Then it is fine-tuned on generated questions of two hops
(`accelerated/lab/systems/two_hops.py`): who has the thing, and which place goes with its holder. Texts have {WINDOWS[0]} to
{WINDOWS[1]} windows, and the first hop comes at any distance before the second. Disjoint windows cannot do better than guess a
span that stands in another window than the first hop: one of {len(two_hops.PLACES)}. Of yes and no this is not proved, because
the maximum over windows joins them.

Both rows begin with the same pretrained weights and are trained alike: {SHORT} updates on texts with at most one paragraph beside
the two hops, then {LONG} on the task's own, {BATCH} questions each. On seed 0 the rates
{" and ".join(f"{rate:g}" for rate in RATES)} are tried, and exact match on the validation questions chooses. Lines and questions
of validation and test are not those of training."""


class Task(NamedTuple):
    """What the rows are trained and asked on."""

    model: Callable[[bool, int], Roberta]  # (recurrent, seed) to a pretrained model
    pad: int  # token id
    stages: list[tuple[list[reader.Example], int]]  # training questions and updates, one after another
    asked: dict[str, list[reader.Example]]  # by split: valid chooses the rate, test is reported
    batch: int
    rates: Sequence[float]


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line; raises InputError for what cannot be."""
    parser = experiment_parser("questions", __doc__, list(ROWS))
    parser.add_argument("--train", type=Path, metavar="FILE", help="HotpotQA's training questions; needs --dev and --roberta")
    parser.add_argument("--dev", type=Path, metavar="FILE", help="HotpotQA's dev questions in the distractor setting")
    text = "folder with RoBERTa's model.safetensors, config.json, vocab.json and merges.txt"
    parser.add_argument("--roberta", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="for HotpotQA's questions (default auto)")
    options = parsed(parser, argv, list(ROWS))
    given = [name for name in ("train", "dev", "roberta") if getattr(options, name) is not None]
    if 0 < len(given) < 3:
        raise InputError(f"--{given[0]} is one of --train, --dev and --roberta; give all three, or none of them")
    figure_class()  # says now if matplotlib is missing
    return options


def small_model(recurrent: bool, seed: int, vocabulary: int) -> Roberta:
    """A small RoBERTa before its pretraining.

    RoBERTa's matrices begin at 0.02, which suits its width; here they are larger, so that their outputs are as large. Positions
    begin as sinusoids, which so short a pretraining would not find.
    """
    model = Roberta(Roberta.Config(vocabulary=vocabulary, recurrent=recurrent, **SIZES), seed)
    half = SIZES["width"] // 2
    angles = torch.arange(SIZES["segment"])[:, None] * 10_000 ** (-torch.arange(half) / half)
    with torch.no_grad():
        model.positions.copy_(0.02 * 2**0.5 * torch.cat([angles.sin(), angles.cos()], 1))
        for name, weight in model.named_parameters():
            if name.startswith("layers.") and weight.dim() == 2:
                weight *= (ROBERTAS_WIDTH / SIZES["width"]) ** 0.5
    return model


def pretrained(tokenizer: RobertaTokenizer, ranks: np.ndarray) -> dict[str, torch.Tensor]:
    """The weights of a small RoBERTa without recurrence after its pretraining."""
    model = small_model(False, 0, tokenizer.vocabulary)
    with Progress("pretraining", PRETRAINING.updates, "update") as bar:
        for _ in reader.pretrain(model, ranks, tokenizer, PRETRAINING, 0):
            bar.update()
    return model.state_dict()


def loaded(weights: dict[str, torch.Tensor], recurrent: bool, seed: int, vocabulary: int) -> Roberta:
    """A small RoBERTa with pretrained weights; the seed draws those of the recurrence alone."""
    model = small_model(recurrent, seed, vocabulary)
    model.load_state_dict(weights, strict=False)
    return model


def task_examples(count: int, lines: Sequence[str], tokenizer: RobertaTokenizer, seed: int) -> list[reader.Example]:
    """Questions of two hops whose texts have as many windows as WINDOWS says."""
    least, most = WINDOWS
    drawn = two_hops.drawn(2 * count, lines, seed)  # more than enough
    every = (reader.cut(question, tokenizer, SIZES["segment"]) for question in drawn)
    return list(itertools.islice((example for example in every if least <= len(example.tokens) <= most), count))


@functools.cache
def generated() -> Task:
    """The small task, its tokenizer and its pretrained model."""
    source = standard_library()
    bpe = train_bpe(source, VOCABULARY)
    tokenizer, lines = of_bpe(bpe), two_hops.prose()
    weights = pretrained(tokenizer, tokenised(source, bpe, default_data_dir()).splits["train"].tokens)
    model = functools.partial(loaded, weights, vocabulary=tokenizer.vocabulary)
    drawn = two_hops.drawn(QUESTIONS["train"], lines["train"], 3, (0, 1))
    short = [reader.cut(question, tokenizer, SIZES["segment"]) for question in drawn]
    stages = [(short, SHORT), (task_examples(QUESTIONS["train"], lines["train"], tokenizer, 0), LONG)]
    unseen = lines["valid"] + lines["test"]
    asked = {split: task_examples(QUESTIONS[split], unseen, tokenizer, seed) for split, seed in (("valid", 1), ("test", 2))}
    return Task(model, tokenizer.pad, stages, asked, BATCH, RATES)


def hotpotqa(train: Path, dev: Path, folder: Path, device: torch.device) -> Task:
    """HotpotQA's questions and RoBERTa's published weights, as in section 5.4; raises InputError if a file cannot be read."""
    tokenizer, config = published_tokenizer(folder), published_config(folder)
    questions, asked = read_questions(train), read_questions(dev)
    drawn = np.random.default_rng(0).permutation(len(questions))[: PAPERS["questions"]]
    examples = (reader.cut(questions[number], tokenizer, config.segment) for number in drawn)
    chosen = [example for example in examples if example.answer is not None]
    if not chosen:
        raise InputError(f"{train} has no question whose answer is yes, no or in its text; give HotpotQA's training questions")
    batch = min(PAPERS["batch"], len(chosen))

    def model(recurrent: bool, seed: int) -> Roberta:
        """RoBERTa; the seed draws the weights of the recurrence and of the answer's head."""
        found = Roberta(dataclasses.replace(config, recurrent=recurrent), seed)
        load_published(found, folder / "model.safetensors")
        return found.to(device)

    stages = [(chosen, PAPERS["epochs"] * len(chosen) // batch)]
    test = [reader.cut(question, tokenizer, config.segment) for question in asked]
    return Task(model, tokenizer.pad, stages, {"test": test}, batch, [PAPERS["rate"]])


def trained(task: Task, row: str, seed: int, rate: float) -> Roberta:
    """A model of a row after all stages of its task."""
    model = task.model(ROWS[row], seed)
    torch.manual_seed(seed)  # dropout
    for examples, updates in task.stages:
        training = reader.Training(updates, task.batch, rate)
        with Progress(f"{row}, seed {seed}, rate {rate:g}", updates, "update") as bar:
            for _ in reader.fine_tune(model, examples, task.pad, training, seed):
                bar.update()
    return model


def answered(task: Task, model: Roberta, examples: Sequence[reader.Example]) -> tuple[dict, list]:
    """(mean scores, [distance between the hops, whether it is a span, exact match] of each question) of a model."""
    found, expected = list(reader.answers(model, examples, task.pad)), [example.question.answer for example in examples]
    rows = [
        [reader.distance(example), answer not in KINDS, int(exact_match(own, answer))]
        for example, own, answer in zip(examples, found, expected, strict=True)
    ]
    return mean_scores(found, expected), rows


def run(task: Task, row: str, seed: int, rates: Sequence[float]) -> dict:
    """What a row reaches with a seed: with the rate whose exact match on validation is best, if there are several."""
    began, tried = time.monotonic(), {}
    for rate in rates:
        model = trained(task, row, seed, rate)
        valid = answered(task, model, task.asked["valid"])[0]["exact match"] if len(rates) > 1 else 0.0
        tried[rate] = valid, model
    rate = max(tried, key=lambda own: tried[own][0])
    scores, rows = answered(task, tried[rate][1], task.asked["test"])
    own = {"rate": rate, "tried": {f"{name:g}": valid for name, (valid, _) in tried.items()} if len(rates) > 1 else {}}
    return own | scores | {"answers": rows, "seconds": round(time.monotonic() - began, 1)}


def rate_of(path: Path, row: str) -> float:
    """The rate that seed 0 has chosen for a row; raises InputError if it has not been trained."""
    try:
        return json.loads(path.read_text())["runs"][row]["0"]["rate"]
    except (OSError, KeyError):
        raise InputError(f"{path} has no rate for {row}, which seed 0 chooses; train seed 0 first") from None


def share(run: dict, chosen: Callable[[int, bool], bool]) -> float | None:
    """Exact match in percent of a run's answers with a chosen (distance, is a span); None without any."""
    right = [right for distance, span, right in run["answers"] if chosen(distance, span)]
    return 100 * statistics.mean(right) if right else None


PARTS = {  # {column: which questions}
    "spans, hops in one window": lambda distance, span: span and distance == 0,
    "spans, hops apart": lambda distance, span: span and distance > 0,
    "yes or no": lambda distance, span: not span,
}


def part(runs: Sequence[dict], chosen: Callable[[int, bool], bool]) -> str:
    """The exact match of runs on chosen questions, for the page."""
    found = [share(own, chosen) for own in runs]
    return "" if None in found else mean_and_spread(found, ".0f")


def page(record: dict) -> str:
    """The page of a record, in Markdown."""
    small, rows = "about" not in record["settings"], []
    for name, own in record["runs"].items():
        runs = list(own.values())
        scores = [mean_and_spread([run[score] for run in runs], ".1f") for score in ("f1", "exact match")]
        rows.append([name, ", ".join(own), *scores, *(part(runs, chosen) for chosen in PARTS.values())])
    head = ["windows", "seeds", "F1", "exact match", *PARTS]
    measured = f"""Measured on {record["date"]}, {record["machine"]}, torch {record["torch"]}. Mean (least .. most) of the seeds,
    in percent; the columns behind exact match are its parts. The method is in its
    [chapter](../pretrained_recurrence.md#question-answering)."""
    about, command = (ABOUT, "") if small else (record["settings"]["about"], " --train FILE --dev FILE --roberta FOLDER")
    parts = ["# Adding Recurrence, Table 3: question answering", wrapped(about)]
    parts += [f"```bash\npython -m accelerated.lab.systems.question_runs{command}\n```", wrapped(measured)]
    parts += [f"![exact match by the distance between the hops]({'pretrained_recurrence-3' if small else 'hotpotqa'}.svg)"]
    minutes = sum(run["seconds"] for own in record["runs"].values() for run in own.values()) / 60
    closing = f"Training and answering took {minutes:.0f} minutes."
    for name, own in record["runs"].items():
        closing += f" The rate of {name} is {next(iter(own.values()))['rate']:g}."
        if tried := own.get("0", {}).get("tried"):
            found = ", ".join(f"{score:.1f} at rate {rate}" for rate, score in tried.items())
            closing += f" Exact match on validation in seed 0: {found}."
    return "\n\n".join([*parts, markdown_table(head, *rows), wrapped(closing)]) + "\n"


def draw(record: dict, path: Path) -> None:
    """Draw exact match on spans by the distance between the hops: the mean of a row's seeds, and each seed as a thin line."""
    figure, axes = new_figure()
    for number, (name, own) in enumerate(record["runs"].items()):
        runs, colour = list(own.values()), f"C{number}"
        distances = sorted({distance for distance, span, _ in runs[0]["answers"] if span})
        curves = [[share(run, lambda d, s, at=at: s and d == at) for at in distances] for run in runs]
        for curve in curves if len(curves) > 1 else ():
            axes.plot(distances, curve, color=colour, linewidth=0.5, alpha=0.4)
        axes.plot(distances, [statistics.mean(values) for values in zip(*curves, strict=True)], "o-", color=colour, label=name)
    if "about" not in record["settings"]:
        axes.axhline(100 / len(two_hops.PLACES), color="0.5", linewidth=1, linestyle=":")
    axes.set(xlabel="windows between the hops", ylabel="exact match on spans, percent", ylim=(0, 102))
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def experiment(options: argparse.Namespace) -> Experiment:
    """Table 3: on the generated questions, or on HotpotQA's."""
    if options.train is None:
        name, make = "pretrained_recurrence-3", generated
        settings = {"sizes": SIZES, "vocabulary": VOCABULARY, "pretraining": list(PRETRAINING), "rates": list(RATES)}
        settings |= {"updates": [SHORT, LONG], "batch": BATCH, "questions": QUESTIONS, "windows": list(WINDOWS)}
    else:
        task = hotpotqa(options.train, options.dev, options.roberta, choose_device(options.device))
        name, make = "hotpotqa", lambda: task
        about = (
            f"RoBERTa is fine-tuned on {len(task.stages[0][0]):,} questions of HotpotQA, and asked {len(task.asked['test']):,}."
        )
        files = options.train, options.dev, options.roberta / "model.safetensors"
        settings = PAPERS | {"about": about, "files": [file_checksum(path) for path in files]}

    def train(row: str, seed: int) -> dict:
        """What a row reaches with a seed."""
        task = make()
        rates = task.rates if seed == 0 or len(task.rates) == 1 else [rate_of(options.out / f"{name}.json", row)]
        return run(task, row, seed, rates)

    def said(run: dict) -> str:
        """The scores of a run."""
        return f"F1 {run['f1']:.1f}, exact match {run['exact match']:.1f}, rate {run['rate']:g}, {run['seconds']:.0f} s"

    return Experiment(name, list(ROWS), settings, train, said, page, draw)


def main(argv: list[str]) -> None:
    """Train what is missing, and write what came out."""
    options = parse_options(argv)
    conduct(experiment(options), options)


if __name__ == "__main__":
    run_program("questions", main, sys.argv[1:])
