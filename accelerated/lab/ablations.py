"""The command `python -m accelerated.lab.ablations`: what the papers say that they tried and left, tried again.

Every model is trained as its paper describes it and with one thing changed, at several learning rates and with seeds 0, 1 and 2.
The same command continues after an interruption; only the model that was being trained begins anew.
"""

import copy
import functools
import itertools
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from accelerated import block_recurrent, compressive, replay
from accelerated.attention.content import content_attention
from accelerated.attention.heads import project
from accelerated.data.corpus import load_corpus
from accelerated.data.lanes import Lanes, cut_for_lanes
from accelerated.data.tokenizers import open_tokenizer
from accelerated.data.windows import Document
from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.evaluation.score import evaluate
from accelerated.lab.experiment import Experiment, conduct
from accelerated.lab.reports.memories import compression_by_layer
from accelerated.lab.speed.timing import markdown_table
from accelerated.lab.tables.page import laid_out, mean_and_spread, wrapped
from accelerated.lab.tables.table import TABLES
from accelerated.models import model_class
from accelerated.program.errors import run_program
from accelerated.program.progress import Progress
from accelerated.protocol import repeat_lane
from accelerated.training import optimization
from accelerated.training.options import parse
from accelerated.training.settings import Settings


class MixedLoss(compressive.Layer):
    """A layer of the Compressive Transformer whose compression loss reaches query, key, value and their matrices."""

    difference = staticmethod(compressive.mean_square)
    weight: float  # of the loss

    def attention_reconstruction(
        self, query: Tensor, key: Tensor, value: Tensor, new: Tensor
    ) -> Tensor:
        """Algorithm 2 without its stop of gradients."""
        evicted = slice(
            self.config.compressed_memory, self.config.compressed_memory + self.config.segment
        )
        target = content_attention(query, key[:, :, evicted], value[:, :, evicted])
        found = content_attention(query, *project(new, self.config.heads, [self.key, self.value]))
        return self.weight * self.difference(found, target)


class MixedNorm(MixedLoss):
    """The same with the paper's own loss."""

    @staticmethod
    def difference(x: Tensor, y: Tensor) -> Tensor:
        """The norm of a lane's x - y, as Algorithm 2 has it, mean of the lanes; equal ones get no NaN as gradient."""
        return (x - y).square().flatten(1).sum(1).add(1e-12).sqrt().mean()


class PlainDots(block_recurrent.Layer):
    """A layer of Transformer-XL with T5's position bias: q·k / sqrt(E) of what was projected, not of unit length."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        """Key, query, None and value, (B, H, N, E) each."""
        key, query, value = project(
            self.dropout(self.norm(x)), self.config.heads, [self.key, self.query, self.value]
        )
        return key, query * self.config.head_width**-0.5, None, value


def mix_losses(model: nn.Module, kind: type = MixedLoss, weight: float = 1.0) -> None:
    """Let the compression loss, times weight, train the whole model; the layers keep their parameters."""
    for layer in model.layers:
        layer.__class__, layer.weight = kind, weight


def drop_normalization(model: nn.Module) -> None:
    """Take dot products of keys and queries as they are; the scales, now factors beside 1 / sqrt(E), begin at 1."""
    for layer in model.layers:
        layer.__class__ = PlainDots
        nn.init.ones_(layer.scale)


class Ablation(NamedTuple):
    """A model as published, and with one thing changed in one way or more."""

    words: str  # the paper's
    options: str  # of train.py
    ways: dict[
        str, Callable[[nn.Module], object]
    ]  # {name: what is done to the model before it is trained}
    rates: tuple[float, ...]


def options_of(table: str, row: str) -> str:
    """The options of a table's row."""
    return f"{TABLES[table].options} {TABLES[table].rows[row].options}"


ABLATIONS = {
    "compression-loss": Ablation(
        """"We stop compression loss gradients from passing into the main network as this prevents learning" (Compressive
        Transformers, 3.2). In the others our mean square, or the norm of Algorithm 2, times a weight, trains the whole model""",
        options_of("compressive-8-9", "compressive"),
        {"alone": id}
        | {
            f"mean-square-x{weight:g}": functools.partial(mix_losses, weight=weight)
            for weight in (1, 10, 100)
        }
        | {
            f"norm-x{weight:g}": functools.partial(mix_losses, kind=MixedNorm, weight=weight)
            for weight in (0.01, 0.1, 1)
        },
        (0.006, 0.018),
    ),
    "normalization": Ablation(
        """"normalization improved the stability of Transformer-XL when used with a relative position bias" (Block-Recurrent
        Transformers, 3.3)""",
        options_of("block_recurrent-1", "XL:W"),
        {"unit-length": id, "as-projected": drop_normalization},
        (0.002, 0.006, 0.018, 0.054),
    ),
}
ROWS = {
    f"{name}-{way}-{rate}": (name, way, rate)
    for name, it in ABLATIONS.items()
    for way in it.ways
    for rate in it.rates
}
EVERY, WATCHED = 20, 32  # updates between target_squares; lanes and segments of each
ABOUT = """The papers say of some things that they made learning worse, or were needed, without a number. Here models are trained
with and without, on the bytes of the standard library. All ways of a seed begin alike and read the same text."""


def gradient_norms(model: nn.Module, settings: Settings, lanes: Lanes) -> Iterator[float]:
    """Train a model; yields the norm of the gradient, before it is clipped, of each step. Ends early if it is not finite."""
    training, optimizer = settings.training, optimization.make_optimizer(model, settings.training)
    state = repeat_lane(model.initial_state(1), training.batch)
    for step in range(1, training.steps + 1):
        segments = [next(lanes) for _ in range(training.horizon)]
        state = replay.BACKPROP[training.backprop](model, segments, state)[-1]
        norm = optimization.average_and_clip(model, 1, training.clip).item()
        if not math.isfinite(norm):
            return
        optimization.set_learning_rate(optimizer, optimization.learning_rate(step, training))
        optimizer.step()
        optimizer.zero_grad()
        yield norm


def target_square(model: nn.Module, documents: Sequence[Document]) -> float:
    """The mean square of what compression is to reconstruct, the attention to what is evicted, a mean of the layers."""
    watched = copy.deepcopy(model).eval()
    for layer in watched.layers:
        layer.__class__ = compressive.Layer
    return compression_by_layer(watched, documents, WATCHED, WATCHED)[1].mean().item()


def trained(row: str, seed: int) -> dict:
    """The test score in bits per byte (None if training diverged), norms of the gradient and target_squares of a row."""
    name, way, rate = ROWS[row]
    ablation = ABLATIONS[name]
    settings, start = parse(shlex.split(f"{ablation.options} --learning-rate {rate} --seed {seed}"))
    tokenizer, training = open_tokenizer(settings.data.tokenizer), settings.training
    splits = load_corpus(settings.data, tokenizer, settings.recall, start.data_dir).splits
    model = model_class(settings.model)(settings.model_config, seed)
    ablation.ways[way](model)
    lanes = Lanes(
        cut_for_lanes(training.batch, splits["train"]),
        training.batch,
        settings.model_config.segment,
        seed,
    )
    norms, targets = [], []
    for norm in Progress(
        f"{row}, seed {seed}", training.steps, "step", over=gradient_norms(model, settings, lanes)
    ):
        norms.append(norm)
        if name == "compression-loss" and not len(norms) % EVERY:
            targets.append(target_square(model, splits["valid"]))
    score = (
        None
        if len(norms) < training.steps
        else evaluate(model, splits["test"], tokenizer, training.batch).bits_per_byte
    )
    later = norms[len(norms) // 2 :] or [math.inf]
    run = {
        "bits_per_byte": score,
        "median_norm": statistics.median(later),
        "largest_norm": max(later),
    }
    return run | ({"targets": targets} if targets else {})


def said(run: dict) -> str:
    """What came out of a run."""
    return (
        "diverged" if run["bits_per_byte"] is None else f"{run['bits_per_byte']:.3f} bits per byte"
    )


def result(record: dict, name: str) -> str:
    """The table of an ablation: a line for each rate and way."""
    ablation, lines = ABLATIONS[name], []
    for rate, way in itertools.product(ablation.rates, ablation.ways):
        if runs := record["runs"].get(f"{name}-{way}-{rate}"):
            bits, medians, largest = zip(
                *([*run.values()][:3] for run in runs.values()), strict=True
            )
            norms = [f"{statistics.mean(norms):.3g}" for norms in (medians, largest)]
            lines.append([way, rate, ", ".join(runs), mean_and_spread(bits, ".3f"), *norms])
    head = [
        name,
        "learning rate",
        "seeds",
        "test, bits per byte",
        "gradient's norm, median",
        "largest",
    ]
    return markdown_table(head, *lines)


def page(record: dict) -> str:
    """The page of a record, in Markdown."""
    how = """, one thread. Mean (least .. most) of the seeds. The gradient's norm, before it is clipped, is that of the second
    half of training, a mean of the seeds. The methods are in their chapters, [compressive](../compressive.md) and
    [block-recurrent](../block_recurrent.md)."""
    parts = []
    for name in dict.fromkeys(ROWS[row][0] for row in record["runs"]):
        parts += [
            f"## {name.capitalize().replace('-', ' ')}",
            wrapped(f"{ABLATIONS[name].words}."),
            result(record, name),
        ]
    picture = "![the mean square of what compression is to reconstruct, by updates](ablations.svg)"
    return laid_out(
        record, "What the papers tried and left", "ablations", ABOUT, how, picture, *parts
    )


def draw(record: dict, path: Path) -> None:
    """Draw how what is reconstructed collapses where the compression's loss reaches it: means of the seeds."""
    figure, [axes] = new_figure()
    for row, runs in record["runs"].items():
        if curves := [
            run["targets"]
            for run in runs.values()
            if "targets" in run and run["bits_per_byte"] is not None
        ]:
            axes.plot(
                EVERY * np.arange(1, len(curves[0]) + 1),
                np.mean(curves, 0),
                label=", ".join(map(str, ROWS[row][1:])),
            )
    axes.set(
        xlabel="updates", ylabel="mean square of the attention that is reconstructed", yscale="log"
    )
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


SETTINGS = {name: ablation.options for name, ablation in ABLATIONS.items()}
EXPERIMENT = Experiment(
    "ablations", __doc__, "ablations", list(ROWS), SETTINGS, trained, said, page, draw
)

if __name__ == "__main__":
    run_program("ablations", conduct, EXPERIMENT, sys.argv[1:])
