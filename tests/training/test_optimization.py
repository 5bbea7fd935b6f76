"""Schedules equal their formulas; optimisers follow the papers' recipes."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from accelerated.block_recurrent import BlockRecurrent, Config
from accelerated.program.errors import InputError
from accelerated.training import optimization
from accelerated.training.optimization import (
    average_and_clip,
    check_finite,
    learning_rate,
    make_optimizer,
    update_due,
)
from accelerated.training.settings import TrainingConfig, preset_settings

BASE = TrainingConfig(steps=1000, learning_rate=0.5, warmup=100, final_fraction=0.1)
QUARTER = 0.5 * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)))  # of the cosine
RATES = [  # (changes, {step: rate})
    ({"schedule": "constant"}, {1: 0.005, 50: 0.25, 100: 0.5, 900: 0.5}),
    (
        {"schedule": "cosine"},
        {50: 0.25, 100: 0.5, 325: QUARTER, 550: 0.5 * 0.55, 1000: 0.05, 2000: 0.05},
    ),
    ({"schedule": "inverse_square_root"}, {50: 0.25 / 10, 100: 0.05, 400: 0.025}),
    ({"schedule": "constant", "warmup": 0}, {1: 0.5}),  # no warm-up starts at the peak
    ({"schedule": "inverse_square_root", "warmup": 0}, {1: 0.5}),
    ({"steps": 5, "warmup": 4}, {5: 0.05}),  # one iteration after it may be the end
]


@pytest.mark.parametrize("changes,rates", RATES, ids=[str(changes) for changes, _ in RATES])
def test_schedules(changes, rates):
    config = dataclasses.replace(BASE, **changes)
    assert {step: learning_rate(step, config) for step in rates} == pytest.approx(rates)


def test_the_compressive_papers_schedule():
    """Section 5: linear from 1e-6 to 3e-4 over 4,000 iterations, then cosine down to 1e-6 over 100,000."""
    config = preset_settings("compressive", "enwik8").training
    for step, expected in (
        (0, 1e-6),
        (2000, (1e-6 + 3e-4) / 2),
        (4000, 3e-4),
        (54_000, (1e-6 + 3e-4) / 2),
        (104_000, 1e-6),
    ):
        assert learning_rate(step, config) == pytest.approx(expected)
    assert (config.clip, config.weight_decay, config.optimizer) == (0.1, 0.0, "adam")


def test_updates_come_every_k_iterations_from_n_on():
    """5.5.1: after every iteration up to n, then after every k-th, and after the last."""
    config = dataclasses.replace(BASE, steps=14, update_every=4, update_every_from=5)
    assert [step for step in range(1, 15) if update_due(step, config)] == [1, 2, 3, 4, 5, 9, 13, 14]
    assert all(update_due(step, BASE) for step in range(1, 1001))
    paper = preset_settings("compressive", "enwik8").training
    assert [s for s in range(59_998, 60_010) if update_due(s, paper)] == [
        59_998,
        59_999,
        60_000,
        60_004,
        60_008,
    ]


class TwoObjectives(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.task, self.other = (
            torch.nn.Parameter(torch.zeros(3)),
            torch.nn.Parameter(torch.zeros(2)),
        )
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def auxiliary_parameters(self):
        return [self.other]


def test_gradients_are_averaged_then_clipped_for_each_objective():
    model = TwoObjectives()
    for limit, task, other in ((0, 4.0, 50.0), (0.1, 0.1, 0.1), (5, 4.0, 5.0)):
        model.task.grad, model.other.grad = (
            torch.tensor([0.0, 12.0, 0.0]),
            torch.tensor([90.0, 120.0]),
        )
        norm = average_and_clip(model, 3, limit).item()
        assert norm == pytest.approx(math.hypot(4, 50), rel=1e-4), (
            "the norm of the mean, before clipping"
        )
        assert model.task.grad.norm() == pytest.approx(task, rel=1e-4)
        assert model.other.grad.norm() == pytest.approx(other, rel=1e-4)
        assert model.other.grad[1] / model.other.grad[0] == pytest.approx(4 / 3)
    alone = BlockRecurrent(Config(width=8, feed_forward=8, recurrent_layers=(), layers=1))
    alone.embedding.grad = torch.full_like(alone.embedding, 3.0)
    average_and_clip(alone, 2, 0)
    assert alone.auxiliary_parameters() == [] and (alone.embedding.grad == 1.5).all()


@pytest.mark.parametrize(
    "name,kind",
    [
        ("adamw", torch.optim.AdamW),
        ("adafactor", torch.optim.Adafactor),
        ("adam", torch.optim.Adam),
    ],
)
def test_optimisers_decay_matrices_only(name, kind):
    model, own = torch.nn.Linear(3, 2), 0.0 if name == "adam" else 0.3
    optimizer = make_optimizer(model, dataclasses.replace(BASE, optimizer=name, weight_decay=own))
    assert type(optimizer) is kind
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decay == {id(model.weight): own, id(model.bias): 0.0}
    if name != "adafactor":
        group = optimizer.param_groups[0]
        assert (group["betas"], group["eps"], group["amsgrad"]) == (
            (0.9, 0.999 if name == "adam" else 0.99),
            1e-8,
            False,
        )
    optimization.set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-7])
def test_adafactor_takes_the_textbooks_step_however_small_the_gradient(scale):
    """Shazeer and Stern, Algorithm 4, with relative steps: the first update has an RMS of 1, times the parameter's RMS.

    torch's own epsilon would outweigh squared gradients below 1e-7. A row of zeros stays finite.
    """
    rng = np.random.default_rng(4)
    value, gradient = rng.normal(size=(5, 7)) * 0.3, rng.normal(size=(5, 7)) * scale
    gradient[2] = 0
    parameter = torch.nn.Parameter(torch.tensor(value, dtype=torch.float32))
    model = torch.nn.ParameterList([parameter])
    optimizer = make_optimizer(
        model,
        dataclasses.replace(BASE, optimizer="adafactor", learning_rate=0.01, weight_decay=0.0),
    )
    parameter.grad = torch.tensor(gradient, dtype=torch.float32)
    optimizer.step()
    square = gradient**2
    update = gradient / np.sqrt(
        np.maximum(np.outer(square.sum(1), square.sum(0)) / square.sum(), 1e-300)
    )
    update /= max(1.0, np.sqrt((update**2).mean()))  # clipping, d = 1
    step = min(0.01, 1.0) * np.sqrt(
        (value**2).mean()
    )  # rho_t = min(learning rate, 1 / sqrt(t)), t = 1
    assert torch.isfinite(parameter).all()
    moved = (parameter.detach().double().numpy() - value) / step
    assert np.abs(moved + update).max() < 2e-3, "in float32"


def test_nan_and_infinite_values_stop_a_run():
    check_finite(3, {"loss": 1e30})
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(
            InputError,
            match=f"the gradient's norm is {value} at step 3; what was saved before stays; try",
        ):
            check_finite(3, {"loss": 2.0, "gradient's norm": value})
