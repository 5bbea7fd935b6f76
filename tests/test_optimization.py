"""Schedules against their formulas, optimisers against what the recipes ask."""

import dataclasses
import math

import pytest
import torch

from accelerated.optimization import learning_rate, make_optimizer, set_learning_rate
from accelerated.settings import TrainingConfig

BASE = TrainingConfig(steps=1000, learning_rate=0.5, warmup=100, final_fraction=0.1)


@pytest.mark.parametrize(
    "schedule,step,expected",
    [
        ("constant", 1, 0.005), ("constant", 50, 0.25), ("constant", 100, 0.5), ("constant", 900, 0.5),
        ("cosine", 50, 0.25), ("cosine", 100, 0.5), ("cosine", 550, 0.5 * 0.55), ("cosine", 1000, 0.05), ("cosine", 2000, 0.05),
        ("cosine", 325, 0.5 * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)))),
        ("inverse_square_root", 50, 0.25 / 10), ("inverse_square_root", 100, 0.05), ("inverse_square_root", 400, 0.025),
    ],
)  # fmt: skip
def test_schedules(schedule, step, expected):
    assert learning_rate(step, dataclasses.replace(BASE, schedule=schedule)) == pytest.approx(expected)


def test_the_papers_schedule():
    """Section 4 and the authors' code: 1 / sqrt(max(t, 1000)) after 1000 steps of linear warm-up."""
    config = TrainingConfig(schedule="inverse_square_root", learning_rate=1.0, warmup=1000)
    for step in (1, 500, 1000, 4000, 500_000):
        assert learning_rate(step, config) == pytest.approx(min(step / 1000, 1) / math.sqrt(max(step, 1000)))


def test_no_warmup_starts_at_the_peak():
    assert learning_rate(1, dataclasses.replace(BASE, warmup=0, schedule="constant")) == 0.5


@pytest.mark.parametrize("name,kind", [("adamw", torch.optim.AdamW), ("adafactor", torch.optim.Adafactor)])
def test_optimisers_decay_matrices_only(name, kind):
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model, dataclasses.replace(BASE, optimizer=name, weight_decay=0.3, beta2=0.97))
    assert isinstance(optimizer, kind)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(model.weight): 0.3, id(model.bias): 0.0}
    if name == "adamw":
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.97)
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.clone()
    optimizer.step()
    assert not torch.equal(before, model.weight)
