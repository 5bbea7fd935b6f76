"""The papers for the tests of models: small configs, their variants, random states and weights."""

import dataclasses
import importlib
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from accelerated.data.tasks import Task
from accelerated.models import model_class, presets_of
from reference import (
    block_recurrent,
    compressive,
    memformer,
    memorizing,
    pretrained_recurrence,
    roberta,
)


class Paper(NamedTuple):
    """One paper's reference and accelerated model, and what its tests need to know."""

    reference: ModuleType
    module: ModuleType  # the accelerated module
    model: type  # the accelerated model's class
    small: object  # SMALL of its presets, which the variants change
    variants: dict  # {name: the fields that it changes}
    random_state: Callable  # (config, rng, batch) -> a state of arrays, not the initial one
    wrong_lengths: dict  # {segment length that `small` does not read: part of the error message}
    shorter: int = 0  # by how many tokens the last segment may be shorter than the others
    tasks: tuple = ()  # the variants that read a Task

    def variant(self, name):
        """The Config of a variant."""
        return dataclasses.replace(self.small, **self.variants[name])

    def random_params(self, config, rng):
        """The reference's parameters, moved away from zero and one so that every term has an effect."""
        return shaken(self.reference.init_params(config, rng), rng)

    def model_with(self, params, config):
        """The accelerated model with a reference's parameters, in training mode."""
        model = self.model(config)
        model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
        return model

    def random_model(self, config, seed=3):
        """The accelerated model with random_params, in evaluation mode."""
        return self.model_with(
            self.random_params(config, np.random.default_rng(seed)), config
        ).eval()

    def to_torch(self, arrays):
        """Turn a reference's State or Task into the accelerated one."""
        kind = Task if type(arrays).__name__ == "Task" else self.module.State
        return kind(*(torch.tensor(field) for field in arrays))


def block_recurrent_state(config, rng, batch):
    """A random state with keys of unit length."""
    shape = (batch, config.layers, config.heads, config.window, config.head_width)
    keys, _ = block_recurrent.unit_norm_forward(rng.standard_normal(shape))
    states = rng.standard_normal((batch, len(config.recurrent_layers), config.states, config.width))
    return block_recurrent.State(states, keys, rng.standard_normal(shape))


def compressive_state(config, rng, batch):
    """A random state of both memories."""
    shapes = [
        (batch, config.layers, rows, config.width)
        for rows in (config.memory, config.compressed_memory)
    ]
    return compressive.State(*(rng.standard_normal(shape) for shape in shapes))


def memformer_state(config, rng, batch):
    """Random slots and previous tokens; the decoder-only model keeps no tokens."""
    memory = rng.standard_normal((batch, config.memories, config.slots, config.width))
    return memformer.State(
        memory,
        rng.integers(
            config.vocabulary, size=(batch, config.segment if config.encoder_layers else 0)
        ),
    )


def memorizing_state(config, rng, batch):
    """A random state with keys of unit length."""
    cache = (batch, config.layers, config.heads, config.segment, config.head_width)
    memory = (batch, config.heads, config.memory, config.head_width)
    keys, memory_keys = (
        memorizing.unit_norm_forward(rng.standard_normal(shape))[0] for shape in (cache, memory)
    )
    return memorizing.State(
        keys, rng.standard_normal(cache), memory_keys, rng.standard_normal(memory)
    )


def pretrained_recurrence_state(config, rng, batch):
    """A random state; lanes are in mid-document, except the last of several."""
    if config.vectors == 0:
        return pretrained_recurrence.initial_state({}, config, batch)
    pooled = rng.standard_normal((batch, config.width))
    return pretrained_recurrence.State(pooled, np.arange(batch) < max(1, batch - 1))


GATES = itertools.product(("fixed", "lstm"), ("dual", "single", "skip"), (False, True))
BLOCK_RECURRENT_VARIANTS = {
    f"{gate}-{kind}{'-feedback' * feedback}": {
        "gate": gate,
        "configuration": kind,
        "feedback": feedback,
    }
    for gate, kind, feedback in GATES
} | {
    "two-recurrent": {"recurrent_layers": (1, 3)},
    "adjacent-recurrent-lstm": {
        "recurrent_layers": (2, 3),
        "gate": "lstm",
        "configuration": "dual",
    },
    "last-recurrent": {"recurrent_layers": (3,)},
    "slide": {"recurrent_layers": ()},
    "xl": {"recurrent_layers": (), "segment": 4},
    "xl-recurrent": {"segment": 4},
    "one-layer-feedback": {"layers": 1, "recurrent_layers": (1,), "feedback": True},
    "states-outnumber-window": {"states": 5, "window": 3, "segment": 9},
}
SIMPLIFIED = {"positions": "simplified", "max_distance": 9}  # less than the distances of 25 keys
COMPRESSIVE_VARIANTS = {
    f"{compression}-{loss}": {"compression": compression, "compression_loss": loss}
    for compression, loss in itertools.product(
        compressive.COMPRESSIONS, compressive.COMPRESSION_LOSSES
    )
} | {
    "transformer-xl": {"compressed_memory": 0},
    "transformer-xl-short": {"compressed_memory": 0, "memory": 3},
    "no-memory": {"memory": 0},
    "nothing-remembered": {"memory": 0, "compressed_memory": 0},
    "short-memory": {"memory": 3},
    "short-memory-most-used": {"memory": 3, "compression": "most_used"},
    "short-memory-bptt": {"memory": 3, "compression_loss": "bptt"},
    "compressed-holds-half-a-segment": {"compressed_memory": 1, "compression_loss": "bptt"},
    "compressed-holds-three": {
        "compressed_memory": 6,
        "compression_rate": 4,
        "compression_loss": "bptt",
    },
    "rate-one": {"compression_rate": 1},
    "rate-of-a-segment": {"compression_rate": 8, "compression_loss": "auto_encoding"},
    "wide-dilations": {"compression": "dilated_conv", "dilations": (3, 11)},
    "one-layer": {"layers": 1},
    "adaptive-attention_reconstruction": {"cutoffs": (3, 7), "div_value": 2},
    "adaptive-conv-bptt": {"cutoffs": (4,), "compression_loss": "bptt"},
    "simplified-attention_reconstruction": SIMPLIFIED,
    "simplified-conv-bptt": SIMPLIFIED | {"compression_loss": "bptt"},
    "simplified-short-memory-most-used": SIMPLIFIED | {"memory": 3, "compression": "most_used"},
    "simplified-transformer-xl": SIMPLIFIED | {"compressed_memory": 0, "max_distance": 40},
}
MEMFORMER_VARIANTS = {
    "encoder-decoder": {},
    "encoder-decoder-clipped": {"max_distance": 2},
    "encoder-decoder-xl": {"positions": "transformer_xl"},
    "encoder-decoder-retentive": {"retention": 1.5},
    "decoder-only": {"encoder_layers": 0},
    "decoder-only-clipped": {"encoder_layers": 0, "max_distance": 1},
    "decoder-only-xl": {"encoder_layers": 0, "positions": "transformer_xl", "decoder_layers": 2},
    "one-token": {"segment": 1},
    "one-slot": {"slots": 1, "encoder_layers": 1, "decoder_layers": 1},
    "one-head": {"heads": 1, "width": 5},
}
MEMORIZING_VARIANTS = {
    "ten-of-thirteen": {},
    "all-of-memory": {"retrieved": 13},
    "one-of-thirteen": {"retrieved": 1},
    "short-memory": {"memory": 3, "retrieved": 2},
    "as-long-as-a-segment": {"memory": 4, "retrieved": 2},
    "first-layer": {"memory_layer": 1},
    "last-layer": {"memory_layer": 3},
    "one-layer": {"layers": 1, "memory_layer": 1},
    "transformer-xl": {"memory": 0},
}
PRETRAINED_RECURRENCE_VARIANTS = {
    "overlapping": {},
    "disjoint": {"overlap": 0},
    "all-but-one-shared": {"overlap": 5},
    "plain": {"vectors": 0},
    "several-vectors": {"vectors": 4},
    "at-every-layer": {"insertion_layers": (1, 2, 3)},
    "at-the-last-layer": {"insertion_layers": (3,), "vectors": 2},
    "max": {"pooling": "max"},
    "fixed-key": {"pooling": "attention"},
    "advance": {"pool": "advance"},
    "advance-fixed-key": {"pool": "advance", "pooling": "attention", "overlap": 1},
    "pooled-after-the-norm": {"pool_final_norm": True},
    "linear-module": {"module_layers": 0},
    "one-token": {"segment": 1, "overlap": 0},
    "one-layer-one-head": {"layers": 1, "insertion_layers": (1,), "heads": 1, "width": 5},
}


def paper(name, variants, random_state, wrong_lengths, **forms):
    modules = (importlib.import_module(f"{side}.{name}") for side in ("reference", "accelerated"))
    return Paper(
        *modules,
        model_class(name),
        presets_of(name).SMALL,
        variants,
        random_state,
        wrong_lengths,
        **forms,
    )


PAPERS = {
    "block_recurrent": paper(
        "block_recurrent",
        BLOCK_RECURRENT_VARIANTS,
        block_recurrent_state,
        {
            length: f"{length} tokens is not a positive multiple of window 4"
            for length in (0, 3, 13)
        },
    ),
    "compressive": paper(
        "compressive",
        COMPRESSIVE_VARIANTS,
        compressive_state,
        {length: f"{length} tokens is not one of 8" for length in (0, 4, 9)},
    ),
    "memformer": paper(
        "memformer",
        MEMFORMER_VARIANTS,
        memformer_state,
        {length: f"{length} tokens is not one of 6" for length in (0, 5, 7)},
        tasks=tuple(
            name for name, change in MEMFORMER_VARIANTS.items() if change.get("encoder_layers") != 0
        ),
    ),
    "memorizing": paper(
        "memorizing",
        MEMORIZING_VARIANTS,
        memorizing_state,
        {length: f"{length} tokens is not one of 4" for length in (0, 3, 8)},
    ),
    "pretrained_recurrence": paper(
        "pretrained_recurrence",
        PRETRAINED_RECURRENCE_VARIANTS,
        pretrained_recurrence_state,
        {length: f"a window of {length} tokens; it must have 1 to 6" for length in (0, 7)},
        shorter=2,
    ),
}
EVERY_VARIANT = [(paper, name) for paper in PAPERS for name in PAPERS[paper].variants]


def pairs(**names):
    """[(paper, variant)] of {paper: variants' names, with spaces between them}."""
    return [(paper, name) for paper, own in names.items() for name in own.split()]


ONE_OF_EACH = pairs(  # variants that differ in their state's fields and in what carries gradient
    block_recurrent="fixed-skip",
    compressive="conv-bptt",
    memformer="encoder-decoder decoder-only",
    memorizing="ten-of-thirteen",
    pretrained_recurrence="overlapping",
)
MORE_KINDS = ONE_OF_EACH + pairs(  # also variants whose tokens read or write other rows
    block_recurrent="slide lstm-dual-feedback",
    compressive="most_used-none transformer-xl simplified-attention_reconstruction simplified-short-memory-most-used",
    memformer="encoder-decoder-xl decoder-only-xl",
    pretrained_recurrence="plain several-vectors",
)


def over(variants=EVERY_VARIANT):
    """Decorator: run the test for each (paper, name) of variants."""
    return pytest.mark.parametrize(
        "paper,name", variants, ids=[" ".join(pair) for pair in variants]
    )


def variant(paper, name):
    """The Config of a paper's variant."""
    return PAPERS[paper].variant(name)


def shaken(params, rng):
    """The parameters, each with random noise added."""
    return {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in params.items()}


def random_task(config, rng, kinds):
    """A reference's random Task with one of `kinds` per lane; infilling lanes have padding."""
    batch, n = len(kinds), config.segment
    reading, prompt = rng.integers(config.vocabulary, size=(2, batch, n))
    readable = np.ones((batch, n), bool)
    for lane in np.flatnonzero(np.array(kinds) == 1):
        reading[lane, n // 2] = config.special("mask")
        readable[lane, n // 2 + 1 + lane % 2 :] = False
    return memformer.Task(np.array(kinds), reading, readable, prompt)


ROBERTA = roberta.Config(
    vocabulary=11,
    width=6,
    layers=3,
    heads=2,
    feed_forward=7,
    segment=8,
    module_width=5,
    dropout=0.0,
)


def roberta_params(config, rng):
    """The reference's parameters, moved away from zero and one so that every term has an effect."""
    return shaken(roberta.init_params(config, rng), rng)


def roberta_example(config, rng):
    """(three windows [(tokens, readable, text)], Answer) of three lanes: one has padding, the last ends before the others."""
    windows, n = [], config.segment
    for k in range(3):
        readable = np.ones((3, n), bool)
        readable[0, n - 2 :] = False
        readable[2] = k < 2
        text = readable.copy()
        text[:, :3] = False
        windows.append((rng.integers(config.vocabulary, size=(3, n)), readable, text))
    return windows, roberta.Answer(
        np.array([0, 2, 0]), np.array([n + 3, 0, 4]), np.array([n + 5, 0, n + 6])
    )
