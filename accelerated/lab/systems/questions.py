"""The command `python -m accelerated.lab.systems.questions`: answers over several windows.

This is Table 3 of Adding Recurrence. A small RoBERTa is trained on generated questions of two hops,
with disjoint windows and with recurrence. It prints F1 and exact match as HotpotQA has them, in
percent.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from accelerated.data.sources import standard_library
from accelerated.data.tokenizers import train_bpe
from accelerated.lab.harness import Experiment, conduct, part_parser, run_command
from accelerated.lab.systems import reader, two_hops
from accelerated.lab.systems.reader import Example
from accelerated.lab.systems.roberta import UNREAD, Roberta
from accelerated.program.errors import optional_package

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
STAGES = (((0, 1), 1000), ((2, 6), 500))  # paragraphs besides the facts, and updates
BATCH = 32
RATE = 0.002
QUESTIONS = (6400, 640)  # of a stage to train on, and asked


def small_model(vocabulary: int, recurrent: bool, seed: int) -> Roberta:
    """A small RoBERTa, whose weights the seed draws.

    RoBERTa's matrices begin at 0.02, which suits its width, 768; here they are larger, so that
    their outputs are as large. Positions begin as sinusoids, which so short a training would not
    find.
    """
    transformers = optional_package("transformers", "this RoBERTa needs", "decoders")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.RobertaConfig(vocab_size=vocabulary, **SIZES)
        roberta = transformers.RobertaModel(config)
    width = SIZES["hidden_size"]
    half = width // 2
    angles = torch.arange(SEGMENT)[:, None] * 10_000 ** (-torch.arange(half) / half)
    with torch.no_grad():
        sinusoids = 0.02 * 2**0.5 * torch.cat([angles.sin(), angles.cos()], 1)
        roberta.embeddings.position_embeddings.weight[UNREAD:] = sinusoids
        for weight in roberta.encoder.parameters():
            if weight.dim() == 2:
                weight *= (768 / width) ** 0.5
    return Roberta(roberta, recurrent, seed)


class Task(NamedTuple):
    """What the rows are trained and asked on."""

    make: Callable[[bool, int], Roberta]  # a model with or without recurrence, by a seed
    stages: Sequence[tuple[list[Example], int]]  # training questions and updates, one after another
    asked: list[Example]
    batch: int
    rate: float


@functools.cache
def make_task() -> Task:
    """The task in the small."""
    bpe = train_bpe(standard_library(), VOCABULARY)

    def make(recurrent: bool, seed: int) -> Roberta:
        return small_model(reader.FIRST + bpe.vocabulary, recurrent, seed)

    def examples(count: int, between: tuple[int, int], seed: int) -> list[Example]:
        questions = two_hops.drawn(count, between, seed)
        return [reader.cut(question, bpe, SEGMENT) for question in questions]

    count, asked = QUESTIONS
    stages = []
    for number, (between, updates) in enumerate(STAGES, start=1):
        stages.append((examples(count, between, number), updates))
    longest, _ = STAGES[-1]
    return Task(make, stages, examples(asked, longest, 0), BATCH, RATE)


def scored(make_task: Callable[[], Task], row: str, seed: int) -> dict[str, float]:
    """F1 and exact match, in percent, of a model that was trained on all stages of a task."""
    task = make_task()
    model = task.make(ROWS[row], seed)
    for examples, updates in task.stages:
        how = (updates, task.batch, task.rate, seed)
        reader.fine_tune(model, examples, *how, f"{row}, seed {seed}")

    found = {"F1": [], "exact match": []}
    for example, given in zip(task.asked, reader.answers(model, task.asked), strict=True):
        answer = example.question.answer
        found["F1"].append(two_hops.f1(given, answer))
        found["exact match"].append(two_hops.is_right(given, answer))
    return {name: 100 * statistics.mean(scores) for name, scores in found.items()}


def said(run: dict) -> str:
    """The scores of a run, in a line."""
    return ", ".join(f"{name} {score:.1f}" for name, score in run.items() if name != "seconds")


def main(argv: list[str]) -> None:
    """Train and ask each row with each seed."""
    parser = part_parser("systems.questions", __doc__)
    torch.set_num_threads(1)  # models so small are slower with more
    train = functools.partial(scored, make_task)
    conduct(Experiment("questions", ROWS, SIZES, train, said), parser.parse(argv))


if __name__ == "__main__":
    run_command("questions", main)
