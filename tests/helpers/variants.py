"""Every model for the tests: small configs, their variants, random states and weights.

A model is found by its name in accelerated.models.NAMES. What its tests must know stands in
tests/models/NAME.py. A model without such a file is tested with the defaults that stand here: its
TEST_CONFIG config as the only variant.
"""

import dataclasses
import importlib
import importlib.util
import inspect

import numpy as np
import pytest
import torch

from accelerated.data.lanes import Task
from accelerated.models import NAMES, model_class, presets_of


class Paper:
    """One paper's reference and accelerated model, and what its tests must know."""

    def __init__(self, name):
        self.reference = importlib.import_module(f"reference.{name}")
        self.module = importlib.import_module(f"accelerated.{name}")
        self.model = model_class(name)
        self.small = presets_of(name).TEST_CONFIG

        # What a model may do without
        source = inspect.getsource(self.module)
        self.has_softmax = hasattr(self.reference, "softmax_forward")
        self.has_compilable = "@compilable" in source
        self.has_checkpointable = "CheckpointableLayer" in source

        own = file_of(name)
        # {name: the fields of `small` that it changes}
        self.variants = getattr(own, "VARIANTS", {"small": {}})
        first = next(iter(self.variants))
        # Variants that differ in their state's fields and in what carries gradient
        self.kinds = getattr(own, "KINDS", (first,))
        # Also variants whose tokens read or write other rows
        self.more_kinds = getattr(own, "MORE_KINDS", ())
        # Also variants with a gate, a compression or a pooling that none of those has
        self.other_types = getattr(own, "OTHER_TYPES", ())
        # Variants with a softmax over a single entry, which has no gradient
        self.no_choice = getattr(own, "NO_CHOICE", ())
        # Variants that read a Task, and random_task(config, rng, kind of each lane)
        self.tasks = getattr(own, "READ_TASKS", ())
        self.random_task = getattr(own, "random_task", None)
        # By how many tokens the last segment may be shorter than the others
        self.shorter = getattr(own, "SHORTER", 0)
        # {segment length that `small` does not read: a part of the error message}
        n = self.small.segment
        refused = {length: f"{length} tokens" for length in (0, n + 1)}
        self.wrong_lengths = getattr(own, "WRONG_LENGTHS", refused)
        # {variant: (how many tokens back attention reaches, a part of what `describe` says)}
        self.described = getattr(own, "DESCRIBED", {})
        # Fields of the next state through which gradient may arrive
        self.carried = getattr(own, "CARRIED", ())
        # Fields that have float32 at least; None is what the initial state has
        self.long_lived = getattr(own, "LONG_LIVED", ()) if own else None
        # Whether it solves a system in float32, in whatever type the model computes
        self.solves = getattr(own, "SOLVES", False)
        # random_state(config, rng, batch) -> a state of arrays, not the initial one
        self.random_state = getattr(own, "random_state", self.shaken_state)

    def variant(self, name):
        """The Config of a variant."""
        return dataclasses.replace(self.small, **self.variants[name])

    def shaken_state(self, config, rng, batch):
        """The initial state with random noise, other token ids, and every flag true."""
        params = self.reference.init_params(config, rng)
        fields = []
        for field in self.reference.initial_state(params, config, batch):
            if field.dtype == bool:
                fields.append(np.ones_like(field))
            elif field.dtype == int:
                fields.append(rng.integers(config.vocabulary, size=field.shape))
            else:
                fields.append(field + rng.standard_normal(field.shape))
        return self.reference.State(*fields)

    def random_params(self, config, rng):
        """The reference's parameters, moved away from 0 and 1 so that every term has an effect."""
        return shaken(self.reference.init_params(config, rng), rng)

    def model_with(self, params, config):
        """The accelerated model with a reference's parameters, in training mode."""
        model = self.model(config)
        model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
        return model

    def random_model(self, config, seed=3):
        """The accelerated model with random_params, in evaluation mode."""
        params = self.random_params(config, np.random.default_rng(seed))
        return self.model_with(params, config).eval()

    def to_torch(self, arrays):
        """Turn a reference's State or Task into the accelerated one."""
        kind = Task if type(arrays).__name__ == "Task" else self.module.State
        return kind(*(torch.tensor(field) for field in arrays))


def file_of(name):
    """The module tests/models/NAME.py, or None if there is none."""
    module = f"tests.models.{name}"
    return importlib.import_module(module) if importlib.util.find_spec(module) else None


def shaken(params, rng):
    """The parameters, each with random noise added."""
    return {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in params.items()}


def listed(field):
    """[(paper, variant)] of all variants that a field of each Paper lists."""
    return [(name, variant) for name, paper in PAPERS.items() for variant in getattr(paper, field)]


def pairs(**names):
    """[(paper, variant)] of {paper: variants' names, with spaces between them}."""
    return [(paper, name) for paper, own in names.items() for name in own.split()]


def variant(paper, name):
    """The Config of a paper's variant."""
    return PAPERS[paper].variant(name)


PAPERS = {name: Paper(name) for name in NAMES}
EVERY_VARIANT = listed("variants")
ONE_OF_EACH = listed("kinds")
MORE_KINDS = ONE_OF_EACH + listed("more_kinds")


def over(variants=EVERY_VARIANT):
    """Decorator: run the test for each (paper, name) of variants."""
    ids = [" ".join(pair) for pair in variants]
    return pytest.mark.parametrize("paper,name", variants, ids=ids)
