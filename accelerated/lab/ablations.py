"""The command `python -m accelerated.lab.ablations`: what the papers tried and left, tried again.

Every model is trained as its paper describes it and with one thing changed, at several learning
rates and with seeds 0, 1 and 2. The same command continues after an interruption; only the model
that was being trained begins anew.
"""

import copy
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from accelerated import block_recurrent, compressive, replay
from accelerated.attention.content import content_attention
from accelerated.attention.heads import project_heads
from accelerated.compressive import mean_norm, mean_square
from accelerated.data.windows import Document
from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.evaluation.score import evaluate
from accelerated.lab.harness import (
    Experiment,
    conduct,
    mean_and_interval,
    paired,
    part_of,
    plus_minus,
    seeds_in_words,
)
from accelerated.lab.pages import (
    label_ends,
    markdown_table,
    mean_and_spread,
    of_experiment,
    wrapped,
)
from accelerated.lab.reports.memories import compression_by_layer
from accelerated.lab.tables.measure import parameters_of
from accelerated.lab.tables.table import TABLES
from accelerated.models import model_class
from accelerated.program.errors import run_program
from accelerated.program.progress import Progress
from accelerated.protocol import Model, repeat_lane
from accelerated.training import optimization
from accelerated.training.opening import documents_of, load_data, new_reader
from accelerated.training.options import parse


class MixedLoss(compressive.Layer):
    """A layer whose compression loss reaches query, key, value and their matrices (Compressive)."""

    difference = staticmethod(mean_square)
    weight: float  # of the loss

    def attention_reconstruction(
        self, query: Tensor, key: Tensor, value: Tensor, new: Tensor
    ) -> Tensor:
        """Algorithm 2 without its stop of gradients."""
        first = self.compressed_rows
        evicted = slice(first, first + self.config.segment)
        target = content_attention(query, key[:, :, evicted], value[:, :, evicted])
        new_key, new_value = project_heads(new, self.config.heads, [self.key, self.value])
        found = content_attention(query, new_key, new_value)
        return self.weight * self.difference(found, target)


class MixedNorm(MixedLoss):
    """The same with the paper's own loss."""

    difference = staticmethod(mean_norm)


class PlainDots(block_recurrent.Layer):
    """A layer whose scores are q·k / sqrt(E) of what was projected, not of unit length (XL)."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        """Key, query, None and value, (B, H, N, E) each."""
        matrices = [self.key, self.query, self.value]
        key, query, value = project_heads(self.dropout(self.norm(x)), self.config.heads, matrices)
        return key, query * self.config.head_width**-0.5, None, value


def as_published(model: Model) -> None:
    """Change nothing."""


def mix_losses(model: compressive.Compressive, kind: type = MixedLoss, weight: float = 1.0) -> None:
    """Let the compression loss, times weight, train the whole model.

    The layers keep their parameters.
    """
    for layer in model.layers:
        layer.__class__ = kind
        layer.weight = weight  # pyright: ignore  # of a MixedLoss


def drop_normalization(model: block_recurrent.BlockRecurrent) -> None:
    """Take dot products of keys and queries as they are.

    The scales, now factors beside 1 / sqrt(E), begin at 1.
    """
    for layer in model.layers:
        layer.__class__ = PlainDots
        nn.init.ones_(layer.scale)


class Ablation(NamedTuple):
    """A model as published, and with one thing changed in one way or more."""

    words: str  # the paper's
    options: str  # of train.py
    # {name: (what is done to the model before it is trained, the learning rates)}
    ways: dict[str, tuple[Callable, tuple[float, ...]]]


def options_of(table: str, row: str) -> str:
    """The options of a table's row."""
    return f"{TABLES[table].options} {TABLES[table].rows[row].options}"


ABLATIONS = {
    "compression-loss": Ablation(
        """"We stop compression loss gradients from passing into the main network as this prevents
        learning" (Compressive Transformers, 3.2). "Alone" is that. In the other rows the loss
        trains the whole model: our mean square or the norm of Algorithm 2, times a weight""",
        options_of("compressive-8-9", "compressive"),
        {
            "alone": (as_published, (0.006, 0.018)),
            "mean-square-x1": (mix_losses, (0.006, 0.018)),
            "mean-square-x10": (partial(mix_losses, weight=10), (0.018,)),
            "mean-square-x100": (partial(mix_losses, weight=100), (0.018,)),
            "norm-x0.01": (partial(mix_losses, kind=MixedNorm, weight=0.01), (0.018,)),
            "norm-x0.1": (partial(mix_losses, kind=MixedNorm, weight=0.1), (0.018,)),
            "norm-x1": (partial(mix_losses, kind=MixedNorm), (0.006, 0.018)),
        },
    ),
    "normalization": Ablation(
        """"normalization improved the stability of Transformer-XL when used with a relative
        position bias" (Block-Recurrent Transformers, 3.3)""",
        options_of("block_recurrent-1", "XL:W"),
        {
            "unit-length": (as_published, (0.002, 0.006, 0.018, 0.054)),
            "as-projected": (drop_normalization, (0.002, 0.006, 0.018, 0.054)),
        },
    ),
}
ROWS = {
    f"{name}-{way}-{rate}": (name, way, rate)
    for name, ablation in ABLATIONS.items()
    for way, (_, rates) in ablation.ways.items()
    for rate in rates
}
EVERY = 20  # updates between target_squares
WATCHED = 32  # lanes and segments of each
TITLE = "What are the stop-gradients of the compression's loss for?"
ANSWER = """Without them the loss trains the model too, and shrinks its own target. The norm of
Algorithm 2 then harms the model from a tenth of its weight on, the mean square, which the authors'
code has, from ten times on. And what is unit length for? Without it Transformer-XL is 0.3 to 1.2
bits worse."""


def target_square(model: compressive.Compressive, documents: Sequence[Document]) -> float:
    """The mean square of the attention that compression is to reconstruct, a mean of the layers."""
    watched = copy.deepcopy(model).eval()
    for layer in watched.layers:
        layer.__class__ = compressive.Layer
    _, targets = compression_by_layer(watched, documents, WATCHED, WATCHED)
    return targets.mean().item()


def trained(row: str, seed: int) -> dict:
    """A row's test score in bits per byte, norms of the gradient and target_squares.

    The score is None if training diverged.
    """
    name, way, rate = ROWS[row]
    ablation = ABLATIONS[name]
    settings, start = parse(shlex.split(f"{ablation.options} --learning-rate {rate} --seed {seed}"))
    training = settings.training
    tokenizer, corpus = load_data(settings, start)
    documents, _ = documents_of(settings, corpus)
    reader = new_reader(settings, documents)
    model = model_class(settings.model)(settings.model_config, seed)
    change, _ = ablation.ways[way]
    change(model)

    state = repeat_lane(model.initial_state(1), training.batch)
    optimizer = optimization.make_optimizer(model, training)
    norms = []  # before clipping
    targets = []
    steps = range(1, training.steps + 1)
    for step in Progress(f"{row}, seed {seed}", training.steps, "step", over=steps):
        segments = reader.rollout(training.horizon)
        _, _, state = replay.BACKPROP[training.backprop](model, segments, state)
        norm = optimization.average_and_clip(model, 1, training.clip).item()
        if not math.isfinite(norm):
            break
        norms.append(norm)
        optimization.set_learning_rate(optimizer, optimization.learning_rate(step, training))
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, compressive.Compressive) and step % EVERY == 0:
            targets.append(target_square(model, corpus.splits["valid"]))

    run: dict = {"bits_per_byte": None}
    if len(norms) == training.steps:
        score = evaluate(model, corpus.splits["test"], tokenizer, training.batch)
        run["bits_per_byte"] = score.bits_per_byte
    later = norms[len(norms) // 2 :] or [math.inf]
    run["median_norm"] = statistics.median(later)
    run["largest_norm"] = max(later)
    if targets:
        run["targets"] = targets
    return run


def said(run: dict) -> str:
    """What came out of a run."""
    bits = run["bits_per_byte"]
    return "diverged" if bits is None else f"{bits:.3f} bits per byte"


def result(record: dict, name: str) -> str:
    """The table of an ablation: a line for each rate and way."""
    lines = []
    published = next(iter(ABLATIONS[name].ways))
    rows = [row for row in ROWS if row in record["runs"] and ROWS[row][0] == name]
    for row in sorted(rows, key=lambda row: ROWS[row][2]):
        _, way, rate = ROWS[row]
        runs = record["runs"][row]
        bits = mean_and_spread([run["bits_per_byte"] for run in runs.values()], ".3f")
        unchanged = record["runs"].get(f"{name}-{published}-{rate}", {})
        behind = "" if way == published else behind_by(unchanged, runs)
        median = statistics.mean(run["median_norm"] for run in runs.values())
        lines.append([way, rate, bits, behind, f"{median:.3g}"])
    head = [name, "learning rate", "test, bits per byte", f"behind {published}"]
    return markdown_table([*head, "gradient's norm"], *lines)


def behind_by(published: dict, runs: dict) -> str:
    """How many bits runs are behind published ones of the same seeds, with a 95% interval.

    It is empty if a run diverged, or none has a partner.
    """
    both = []
    for own in (published, runs):
        both.append({seed: run["bits_per_byte"] for seed, run in own.items()})
    differences = paired(*both)
    if not differences or not all(map(math.isfinite, differences)):
        return ""
    return plus_minus(*mean_and_interval(differences))


def page(record: dict) -> str:
    """The page of a record, in Markdown."""
    how = f""", one thread. The text is bytes of Python {record["python"]}'s standard library. All
    rows of a seed begin alike and read the same text. Scores are {of_seeds(record)}.
    "Behind" is the mean difference of the same seeds, with its 95% interval. The
    gradient's norm is the median before clipping, over the second half of training. Chapters:
    [compressive](../compressive.md), [block-recurrent](../block_recurrent.md)."""
    parts = []
    for name in dict.fromkeys(ROWS[row][0] for row in record["runs"]):
        title = f"## {name.capitalize().replace('-', ' ')}"
        settings, _ = parse(shlex.split(ABLATIONS[name].options))
        about = f"{ABLATIONS[name].words}. A model has {parameters_of(settings):,} parameters."
        parts += [title, wrapped(about), result(record, name)]
    change = """Longer training: these are 400 updates, which measure how fast a model learns. A
    deeper model."""
    smallest = "is each row's own ±."
    whole = (TITLE, ANSWER, parts, how, smallest, change)
    return of_experiment(record, part_of(record, list(ROWS)), "ablations", "ablations", *whole)


def of_seeds(record: dict) -> str:
    """What the scores of a record are, in words."""
    seeds = seeds_in_words(record["runs"])
    return f"of {seeds}" if seeds.startswith("seed ") else f"means of {seeds} (least..most)"


def draw(record: dict, path: Path) -> None:
    """Draw how what is reconstructed collapses if the compression's loss reaches it.

    Lines are means of the seeds that did not diverge.
    """
    figure, [axes] = new_figure()
    ends = {}  # {name: (x, y) of its line's end}
    for row, runs in record["runs"].items():
        finished = [run for run in runs.values() if run["bits_per_byte"] is not None]
        curves = [run["targets"] for run in finished if "targets" in run]
        if not curves:
            continue
        updates = EVERY * np.arange(1, len(curves[0]) + 1)
        _, way, rate = ROWS[row]
        means = np.mean(curves, 0)
        axes.plot(updates, means, color=f"C{len(ends)}")
        ends[f"{way}, {rate}"] = (updates[-1], means[-1])
    axes.set(xlabel="updates", ylabel="mean square of what is reconstructed")
    axes.set_yscale("log")
    label_ends(axes, ends, {name: f"C{number}" for number, name in enumerate(ends)})
    save_figure(figure, path)


SETTINGS = {name: ablation.options for name, ablation in ABLATIONS.items()}
EXPERIMENT = Experiment(
    "ablations", __doc__, "ablations", list(ROWS), SETTINGS, trained, said, page, draw
)

if __name__ == "__main__":
    run_program("ablations", conduct, EXPERIMENT, sys.argv[1:])
