"""The command `python -m accelerated.lab.ablations`: what the papers say that they tried and left, tried again.

Every model is trained as its paper describes it and with one thing changed, at several learning rates and with seeds 0, 1 and 2.
The same command continues after an interruption; only the model that was being trained begins anew.
"""

import copy
import itertools
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from accelerated import block_recurrent, compressive, replay
from accelerated.attention.content import content_attention, scaled_attention
from accelerated.attention.heads import merge_heads, split_heads, unit_norm
from accelerated.data.lanes import Lanes, cut_for_lanes
from accelerated.evaluation.score import evaluate
from accelerated.lab.experiment import Experiment, conduct, experiment_parser, parsed
from accelerated.lab.markdown import markdown_table
from accelerated.lab.tables.block_recurrent import SCALES
from accelerated.lab.tables.compressive import BEST, MODELS
from accelerated.lab.tables.page import mean_and_spread, wrapped
from accelerated.models import model_class
from accelerated.program.errors import run_program
from accelerated.program.progress import Progress
from accelerated.protocol import repeat_lane
from accelerated.training import optimization
from accelerated.training.options import parse
from accelerated.training.run import load_data
from accelerated.training.settings import Settings


class MixedLoss(compressive.Layer):
    """A layer of the Compressive Transformer whose compression loss reaches query, key, value and their matrices."""

    def attention_reconstruction(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, new: torch.Tensor
    ) -> torch.Tensor:
        """Algorithm 2 without its stop of gradients."""
        own = slice(self.config.compressed_memory, self.config.compressed_memory + self.config.segment)
        target = content_attention(query, key[:, :, own], value[:, :, own])
        projected = functional.linear(new, torch.cat([self.key, self.value]))
        return compressive.mean_square(content_attention(query, *split_heads(projected, self.config.heads, 2)), target)


class PlainDots(block_recurrent.Layer):
    """A layer of Transformer-XL with T5's position bias: q·k / sqrt(E) of what was projected, not of unit length."""

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]:
        """Key, query, None and value, (B, H, N, E) each."""
        x = self.dropout(self.norm(x))
        weight = torch.cat([self.key, self.query, self.value])
        key, query, value = split_heads(functional.linear(x, weight), self.config.heads, 3)
        return key, query * self.config.head_width**-0.5, None, value


class ThirdGate(block_recurrent.Recurrence):
    """A cell of configuration dual whose states attend to themselves, pass a gate, attend to the tokens, and pass another."""

    def update(self, states: torch.Tensor, projected: tuple, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The states after a block, from its own and the previous block's keys and values (B, H, 2W, E)."""
        state_key, query, _, state_value = projected
        own = merge_heads(scaled_attention(query, state_key, state_value, self.scale))
        states = self.attention_gate(states, own)
        rows = functional.linear(self.cross_norm(states) + self.ids, self.cross_query)
        [cross_query] = split_heads(rows, self.config.heads, 1)
        cross = merge_heads(scaled_attention(unit_norm(cross_query), keys, values, self.cross_scale))
        states = self.cross_gate(states, cross)
        return self.mlp_gate(states, torch.relu(functional.linear(self.mlp_norm(states), self.mlp_hidden)))


class WithoutConstants(block_recurrent.LSTMGate):
    """A gate of Eq. 4 without the constants -1 and +1, which its biases begin at instead."""

    def forward(self, carry: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The states (B, S, D) after a gate that reads `hidden` (B, S, I)."""
        z, i, f = (
            functional.linear(hidden, weight, bias)
            for weight, bias in ((self.weight_z, self.bias_z), (self.weight_i, self.bias_i), (self.weight_f, self.bias_f))
        )
        return carry * torch.sigmoid(f) + torch.tanh(z) * torch.sigmoid(i)


def of_half(gate: nn.Module, half: int) -> nn.Module:
    """A gate of one half of what this gate reads, with that half's weights at the variance that the shorter sum asks for."""
    gate = copy.deepcopy(gate)
    for name, weight in list(gate.named_parameters()):
        if weight.dim() == 2:
            setattr(gate, name, nn.Parameter(2**0.5 * weight.detach().chunk(2, 1)[half].clone()))
    return gate


def mix_losses(model: nn.Module) -> None:
    """Let the compression loss train the whole model."""
    for layer in model.layers:
        layer.__class__ = MixedLoss


def drop_normalization(model: nn.Module) -> None:
    """Take dot products of keys and queries as they are; the scales, now factors beside 1 / sqrt(E), begin at 1."""
    for layer in model.layers:
        layer.__class__ = PlainDots
        nn.init.ones_(layer.scale)


def add_gate(model: nn.Module) -> None:
    """Give the states' two attentions a gate each, one after the other."""
    for cell in (layer.state for layer in model.layers if layer.state is not None):
        cell.__class__ = ThirdGate
        cell.attention_gate, cell.cross_gate = (of_half(cell.attention_gate, half) for half in (0, 1))
        cell.cross_norm = copy.deepcopy(cell.norm)


def drop_constants(model: nn.Module) -> None:
    """Let the gates' biases begin at -1 and +1 instead of adding these: the same function, but Adafactor's steps are larger."""
    for gate in (module for module in model.modules() if isinstance(module, block_recurrent.LSTMGate)):
        gate.__class__ = WithoutConstants
        with torch.no_grad():
            gate.bias_i.sub_(1)
            gate.bias_f.add_(1)


class Ablation(NamedTuple):
    """One thing changed: options of train.py, what is done to the model before it is trained, or options that are added."""

    words: str  # the paper's
    options: str
    published: str
    changed: str
    change: Callable[[nn.Module], None] | None = None
    rates: tuple[float, ...] = (0.006, 0.018)
    added: str = ""


def filled(scale: tuple[str, dict], options: str) -> str:
    """The options of a table's scale with a row's own."""
    return f"{scale[0]} {options.format_map(scale[1])}"


GATE_RATES = (0.02, 0.06, 0.18)  # Adafactor multiplies them by a parameter's own scale
BLOCK_RECURRENT = SCALES["small"][:2]
ABLATIONS = {
    "compression-loss": Ablation(
        """"We stop compression loss gradients from passing into the main network as this prevents learning" (Compressive
        Transformers, 3.2)""",
        filled(MODELS["small"], f"--memory {{M}} --compressed-memory {{C}} {BEST}"),
        "compression alone", "whole model", mix_losses,
    ),
    "normalization": Ablation(
        """"normalization improved the stability of Transformer-XL when used with a relative position bias" (Block-Recurrent
        Transformers, 3.3)""",
        filled(BLOCK_RECURRENT, "--recurrent-layers none --segment {W} --batch {lanes of W}"),
        "unit length", "as projected", drop_normalization, (0.002, 0.006, 0.018, 0.054),
    ),
    "third-gate": Ablation(
        """"Doing them sequentially ... would introduce a third gate in the horizontal direction, which reduced model accuracy"
        (Block-Recurrent Transformers, 3.2)""",
        filled(BLOCK_RECURRENT, "--gate fixed --configuration dual"),
        "in parallel", "one after the other", add_gate,
    ),
    "gates": Ablation(
        """"training stability is quite sensitive to how the gates are initialized ... If a bias term is initialized to 1 ... the
        initial updates will be large" (Block-Recurrent Transformers, 3.5)""",
        filled(BLOCK_RECURRENT, "--gate lstm --configuration single --optimizer adafactor"),
        "constants of -1 and +1 beside small biases", "biases that begin at -1 and +1", drop_constants, GATE_RATES,
    ),
    "clipping": Ablation(
        """"We clipped the gradients to have a norm of at most 0.1, which was crucial to successful optimisation" (Compressive
        Transformers, 5)""",
        filled(MODELS["small"], f"--memory {{M}} --compressed-memory {{C}} {BEST} --clip 0.1"),
        "at most 0.1", "any norm", rates=(0.006, 0.018, 0.054), added="--clip 0",
    ),
}  # fmt: skip
WAYS = ("published", "changed")
ROWS = {
    f"{name}-{way}-{rate}": (name, way, rate)
    for name, own in ABLATIONS.items()
    for way, rate in itertools.product(WAYS, own.rates)
}
ABOUT = """The papers say of some things that they made learning worse, or were needed, without a number. Here a model is trained
as its paper describes it and with that one thing changed, on the bytes of the standard library, with the options of the papers'
tables and at several learning rates. Both ways of a seed begin with the same weights and read the same text in the same order."""


def gradient_norms(model: nn.Module, settings: Settings, lanes: Lanes) -> Iterator[float]:
    """Train a model; yields the norm of the gradient, before it is clipped, of each step. Ends early if it is not finite."""
    training, optimizer = settings.training, optimization.make_optimizer(model, settings.training)
    state = repeat_lane(model.initial_state(1), training.batch)
    for step in range(1, training.steps + 1):
        _, state = replay.BACKPROP[training.backprop](model, [next(lanes) for _ in range(training.horizon)], state)
        norm = optimization.average_and_clip(model, 1, training.clip).item()
        if not math.isfinite(norm):
            return
        optimization.set_learning_rate(optimizer, optimization.learning_rate(step, training))
        optimizer.step()
        optimizer.zero_grad()
        yield norm


def trained(row: str, seed: int) -> dict:
    """The test score in bits per byte (None if training diverged), norms of the gradient, and the seconds, of a row."""
    name, way, rate = ROWS[row]
    began, ablation = time.monotonic(), ABLATIONS[name]
    added = ablation.added if way == "changed" else ""
    settings, beginning = parse(shlex.split(f"{ablation.options} {added} --learning-rate {rate} --seed {seed}"))
    tokenizer, corpus = load_data(settings, beginning)
    training, config = settings.training, settings.model_config
    model = model_class(settings.model)(config, seed)
    if way == "changed" and ablation.change:
        ablation.change(model)
    lanes = Lanes(cut_for_lanes(training.batch, corpus.splits["train"]), training.batch, config.segment, seed)
    with Progress(f"{row}, seed {seed}", training.steps, "step") as bar:
        norms = []
        for norm in gradient_norms(model, settings, lanes):
            norms.append(norm)
            bar.update()
    finite = len(norms) == training.steps
    score = evaluate(model, corpus.splits["test"], tokenizer, training.batch).bits_per_byte if finite else None
    later = norms[len(norms) // 2 :] or [math.inf]
    return {
        "bits_per_byte": score, "median_norm": statistics.median(later), "largest_norm": max(later),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def said(run: dict) -> str:
    """What came out of a run."""
    score = "diverged" if run["bits_per_byte"] is None else f"{run['bits_per_byte']:.3f} bits per byte"
    return f"{score}, {run['seconds']:.0f} s"


def result(record: dict, name: str) -> str:
    """The table of an ablation: a line for each rate and way."""
    ablation, rows = ABLATIONS[name], []
    for rate, way in itertools.product(ablation.rates, WAYS):
        if own := record["runs"].get(f"{name}-{way}-{rate}"):
            scores = [run["bits_per_byte"] for run in own.values()]
            norms = [statistics.mean(run[kind] for run in own.values()) for kind in ("median_norm", "largest_norm")]
            numbers = [mean_and_spread(scores, ".3f"), *(f"{norm:.3g}" for norm in norms)]
            rows.append([getattr(ablation, way), f"{rate}", ", ".join(own), *numbers])
    head = [name, "learning rate", "seeds", "test, bits per byte", "gradient's norm, median", "largest"]
    return markdown_table(head, *rows)


def page(record: dict) -> str:
    """The page of a record, in Markdown."""
    when = f"""Measured on {record["date"]}, {record["machine"]}, torch {record["torch"]}, one thread. Mean (least .. most) of
    the seeds. The gradient's norm, before it is clipped, is that of the second half of training, a mean of the seeds. The methods
    are in their chapters, [compressive](../compressive.md) and [block-recurrent](../block_recurrent.md)."""
    parts = ["# What the papers tried and left", wrapped(ABOUT), "```bash\npython -m accelerated.lab.ablations\n```"]
    parts.append(wrapped(when))
    measured = {ROWS[row][0] for row in record["runs"]}
    for name, ablation in ((name, own) for name, own in ABLATIONS.items() if name in measured):
        parts += [f"## {name.capitalize().replace('-', ' ')}", wrapped(f"{ablation.words}."), result(record, name)]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> None:
    """Train what is missing, and write what came out."""
    options = parsed(experiment_parser("ablations", __doc__, list(ROWS)), argv, list(ROWS))
    settings = {name: own.options for name, own in ABLATIONS.items()}
    conduct(Experiment("ablations", list(ROWS), settings, trained, said, page), options)


if __name__ == "__main__":
    run_program("ablations", main, sys.argv[1:])
