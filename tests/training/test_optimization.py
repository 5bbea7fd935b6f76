"""Schedules equal their formulas; optimisers follow the papers' recipes."""

import copy
import dataclasses
import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from accelerated.training.checkpoint import load_checkpoint, load_moments, save_checkpoint
from accelerated.training.optimization import (
    LARGE,
    average_and_clip,
    backprop_of,
    compiles_methods,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    update_due,
)
from accelerated.training.settings import CHOICES, TrainingConfig
from tests.helpers.comparison import assert_agree
from tests.helpers.programs import EMPTY_CHECKPOINT
from tests.helpers.rollouts import back_propagated, setting

BASE = TrainingConfig(steps=1000, learning_rate=0.5, warmup=100, final_fraction=0.1)
QUARTER = 0.5 * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)))  # of the cosine
RATES = [  # (changes, {step: rate})
    ({"schedule": "constant"}, {1: 0.005, 50: 0.25, 100: 0.5, 900: 0.5}),
    (
        {"schedule": "cosine"},
        {50: 0.25, 100: 0.5, 325: QUARTER, 550: 0.5 * 0.55, 1000: 0.05, 2000: 0.05},
    ),
    ({"schedule": "inverse_square_root"}, {50: 0.25 / 10, 100: 0.05, 400: 0.025}),
    ({"initial_fraction": 0.2}, {0: 0.1, 50: 0.3, 100: 0.5, 550: 0.5 * 0.55}),
    ({"schedule": "constant", "warmup": 0}, {1: 0.5}),  # no warm-up starts at the peak
    ({"schedule": "inverse_square_root", "warmup": 0}, {1: 0.5}),
    ({"steps": 5, "warmup": 4}, {5: 0.05}),  # one iteration after it may be the end
]


@pytest.mark.parametrize("changes,rates", RATES, ids=[str(changes) for changes, _ in RATES])
def test_schedules(changes, rates):
    config = dataclasses.replace(BASE, **changes)
    for step, rate in rates.items():
        found = learning_rate(step, config)
        when = "in warm-up" if step <= config.warmup else f"of the schedule {config.schedule}"
        said = f"step {step} {when} has the learning rate {found:.6g}, expected {rate:.6g}"
        assert found == pytest.approx(rate), said


def test_updates_come_every_k_iterations_from_n_on():
    """5.5.1: after every iteration up to n, then after every k-th, and after the last."""
    gathering = dataclasses.replace(BASE, steps=14, update_every=4, update_every_from=5)
    found = [step for step in range(1, 15) if update_due(step, gathering)]
    assert found == [1, 2, 3, 4, 5, 9, 13, 14], "the steps that an update comes after"
    assert all(update_due(step, BASE) for step in range(1, 1001)), "by default after each"


class TwoObjectives(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.task = torch.nn.Parameter(torch.zeros(3))
        self.other = torch.nn.Parameter(torch.zeros(2))
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def auxiliary_parameters(self):
        return [self.other]


@pytest.mark.parametrize("limit,task,other", [(0, 4.0, 50.0), (0.1, 0.1, 0.1), (5, 4.0, 5.0)])
def test_gradients_are_averaged_then_clipped_for_each_objective(limit, task, other):
    """The norm is that of the mean over three iterations, of both objectives, before clipping."""
    model = TwoObjectives()
    model.task.grad = torch.tensor([0.0, 12.0, 0.0])
    model.other.grad = torch.tensor([90.0, 120.0])
    found = {"all, before clipping": average_and_clip(model, 3, limit).item()}
    found["the task, clipped"] = model.task.grad.norm().item()
    found["the auxiliary loss, clipped"] = model.other.grad.norm().item()
    for what, expected in zip(found, (math.hypot(4, 50), task, other), strict=True):
        said = f"the norm of {what}, is {found[what]:.6g}, expected {expected:.6g}"
        assert found[what] == pytest.approx(expected, rel=1e-4), said


OPTIMISERS = [  # (--optimizer, its class, weight decay, second-moment decay)
    ("adamw", torch.optim.AdamW, 0.3, 0.99),
    ("adam", torch.optim.Adam, 0.0, 0.999),
    ("adafactor", torch.optim.Adafactor, 0.3, None),
]


@pytest.mark.parametrize("name,kind,decay,beta2", OPTIMISERS)
def test_optimisers_decay_matrices_only(name, kind, decay, beta2):
    model = torch.nn.Linear(3, 2)
    training = dataclasses.replace(BASE, optimizer=name, weight_decay=decay)
    optimizer = make_optimizer(model, training)
    assert type(optimizer) is kind, "another optimiser: make_optimizer"
    matrices, vectors = optimizer.param_groups
    assert (matrices["params"], vectors["params"]) == ([model.weight], [model.bias]), (
        "matrices decay, vectors do not"
    )
    decays = (matrices["weight_decay"], vectors["weight_decay"])
    assert decays == (decay, 0.0), f"{name} decays matrices and vectors by {decays}"
    for group in (matrices, vectors) if beta2 else ():
        found = (group["betas"], group["eps"], group["amsgrad"])
        assert found == ((0.9, beta2), 1e-8, False), f"{name} has betas, epsilon, amsgrad {found}"
    set_learning_rate(optimizer, 0.125)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [0.125, 0.125], f"a group keeps another rate: {rates}"


RELATIVE = dataclasses.replace(BASE, optimizer="adafactor", weight_decay=0.0, learning_rate=0.01)


def adafactors_update(gradient):
    """The first update of Shazeer and Stern, Algorithm 4, for a matrix."""
    square = gradient**2
    factored = np.outer(square.sum(1), square.sum(0)) / square.sum()
    update = gradient / np.sqrt(np.maximum(factored, 1e-300))
    return update / max(1.0, np.sqrt((update**2).mean()))  # clipping, d = 1


def test_adafactors_momentum_averages_its_updates():
    """As optax's `ema` without correction: the average a of updates u is 0.9 a + 0.1 u.

    It is kept in the optimiser's state, so a run resumes with it; without one parameters are
    torch's.
    """
    rng = np.random.default_rng(3)
    gradients = torch.tensor(rng.normal(size=(3, 4, 6)))
    model = torch.nn.Linear(6, 4, bias=False).double()
    own = make_optimizer(model, dataclasses.replace(RELATIVE, optimizer="adafactor_momentum"))
    average = torch.zeros_like(model.weight)
    plain = torch.nn.Linear(6, 4, bias=False).double()
    other = make_optimizer(plain, RELATIVE)
    for gradient in gradients:
        # torch's own update of the same parameter, with second moments of all gradients so far
        plain.weight.data.copy_(model.weight.data)
        plain.weight.grad = gradient.clone()
        before = plain.weight.detach().clone()
        other.step()
        average = 0.9 * average + 0.1 * (before - plain.weight.detach())

        model.weight.grad = gradient.clone()
        own.step()
        assert_agree(before - average, model.weight, 1e-12, "0.9 of the average, 0.1 of the update")


def trained(model, optimizer, training, gradients, first):
    """The model after one update by each of the gradients; `first` is the first update's number."""
    for number, gradient in enumerate(gradients, first):
        model.weight.grad = gradient.clone()
        model.bias.grad = gradient.sum(1)
        set_learning_rate(optimizer, learning_rate(number, training))
        optimizer.step()
    return model


@pytest.mark.parametrize("schedule", CHOICES["schedule"])
@pytest.mark.parametrize("name", CHOICES["optimizer"])
def test_every_optimiser_resumes_bit_for_bit(name, schedule, tmp_path):
    """Interrupted after three of six updates, and read again from the checkpoint's file."""
    training = dataclasses.replace(
        BASE, optimizer=name, schedule=schedule, warmup=2, weight_decay=0.0
    )
    gradients = torch.randn(6, 4, 6)
    whole = torch.nn.Linear(6, 4)
    resumed = copy.deepcopy(whole)
    trained(whole, make_optimizer(whole, training), training, gradients, 1)

    optimizer = make_optimizer(resumed, training)
    trained(resumed, optimizer, training, gradients[:3], 1)
    save_checkpoint(tmp_path / "c.pt", EMPTY_CHECKPOINT | {"optimizer": optimizer.state_dict()})
    optimizer = make_optimizer(resumed, training)
    load_moments(optimizer, load_checkpoint(tmp_path / "c.pt")["optimizer"])
    trained(resumed, optimizer, training, gradients[3:], 4)
    for key, expected in whole.state_dict().items():
        found = resumed.state_dict()[key]
        assert torch.equal(found, expected), (
            f"{key} is {found.flatten()[:3]} after resuming and {expected.flatten()[:3]} without: "
            f"look at load_moments in training/checkpoint.py, and at what {name} keeps"
        )


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-7])
def test_adafactor_takes_the_textbooks_step_however_small_the_gradient(scale):
    """With relative steps: the first update has an RMS of 1, times the parameter's RMS.

    torch's own epsilon would outweigh squared gradients below 1e-7. A row of zeros stays finite.
    """
    rng = np.random.default_rng(4)
    value = rng.normal(size=(5, 7)) * 0.3
    gradient = rng.normal(size=(5, 7)) * scale
    gradient[2] = 0
    parameter = torch.nn.Parameter(torch.tensor(value, dtype=torch.float32))
    model = torch.nn.ParameterList([parameter])
    optimizer = make_optimizer(model, RELATIVE)
    parameter.grad = torch.tensor(gradient, dtype=torch.float32)
    optimizer.step()
    assert torch.isfinite(parameter).all(), "a row of zeros gives NaN"
    rate = min(0.01, 1.0) * np.sqrt((value**2).mean())  # rho_t = min(rate, 1 / sqrt(t)), t = 1
    moved = (parameter.detach().double().numpy() - value) / rate
    apart = np.abs(moved + adafactors_update(gradient)).max()
    said = f"the first update is {apart:.3g} off, in its RMS: look at the epsilons of Adafactor"
    assert apart < 2e-3, said


def test_layers_that_are_computed_again_drop_the_same_entries():
    """--checkpoint-layers; all models and methods: tests/compile/test_checkpoint_layers.py."""
    model, *given = setting("memformer", "decoder-only")
    assert model.config.dropout > 0
    layer = model.decoder.layers[0]
    called = Mock(return_value=None)
    layer.register_forward_pre_hook(called)
    expected = back_propagated("through_time", model, *given)
    once = called.call_count
    backprop_of(model, TrainingConfig(checkpoint_layers=True))
    found = back_propagated("through_time", model, *given)
    assert_agree(expected, found, 1e-12, "a layer computed twice drops other entries")
    assert called.call_count == once + 2 * once, "--checkpoint-layers computes no layer twice"


def test_layers_are_compiled_if_it_is_asked_for():
    """By default on a GPU alone."""
    model = torch.nn.ParameterDict({"embedding": torch.empty(LARGE // 4, 4)})
    asked = {name: TrainingConfig(compile=name) for name in CHOICES["compile"]}
    found = [name for name, training in asked.items() if compiles_methods(training, model)]
    assert found == ["inductor"]
