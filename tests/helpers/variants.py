"""Every model for the tests: small configs, their variants, random states and weights.

A model is found by its name in accelerated.models.NAMES. Its variants stand in
tests/models/NAME.txt, and NAME.py has what is computed. A model without such files is tested with
the defaults that stand here: its TEST_CONFIG config as the only variant.
"""

import collections
import dataclasses
import importlib
import importlib.util
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from accelerated.data.lanes import Task
from accelerated.models import NAMES, model_class, presets_of
from reference.gradients import fields_of

MODEL_FILES = Path(__file__).parents[1] / "models"


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

        self.variants = {}  # {name: the fields of `small` that it changes}
        # {variant: (how many tokens back attention reaches, a part of what `describe` says)}
        self.described = {}
        self.wrong_lengths = {}  # {length of a segment: a part of the refusal}
        marked = collections.defaultdict(list)  # {word: the variants that have it}
        for row in rows_of(name, self.small):
            first, rest = row.split(" ", 1)
            if first == "says":
                variant, reach, words = rest.split(" ", 2)
                self.described[variant] = int(reach), words
            elif first == "refuses":
                length, words = rest.split(" ", 1)
                self.wrong_lengths[int(length)] = words
            else:
                words, brace, changes = rest.partition("{")
                self.variants[first] = fields_of(brace + changes)
                for word in words.split():
                    marked[word].append(first)
        # Variants that differ in their state's fields and in what carries gradient
        self.kinds = marked["kind"]
        # Also variants whose tokens read or write other rows
        self.more_kinds = marked["more"]
        # Also variants with a gate, a compression or a pooling that none of those has
        self.other_types = marked["other"]
        # Variants with a softmax over a single entry, which has no gradient
        self.no_choice = marked["no-choice"]
        # Variants that read a Task, and random_task(config, rng, kind of each lane)
        self.tasks = marked["tasks"]
        own = file_of(name)
        self.random_task = getattr(own, "random_task", None)
        # By how many tokens the last segment may be shorter than the others
        self.shorter = getattr(own, "SHORTER", 0)
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


def rows_of(name, config):
    """The rows of tests/models/NAME.txt, or those of a model without one."""
    path = MODEL_FILES / f"{name}.txt"
    if path.exists():
        return [row for row in path.read_text("utf-8").splitlines() if row[0] != "#"]
    return ["small kind {}", *(f"refuses {n} {n} tokens" for n in (0, config.segment + 1))]


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
