"""Calls train.py and eval.py as a user does, with options for runs of a few seconds."""

from pathlib import Path

import torch

import eval as evaluation_script
import train as training_script
from accelerated.evaluation.options import parse
from accelerated.training.checkpoint import load_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.options import parse as parse_training

ROOT = Path(__file__).parents[2]

TINY = [
    *("--width", 16, "--layers", 2, "--heads", 2, "--head-width", 8, "--feed-forward", 32, "--window", 8, "--segment", 16),
    *("--states", 4, "--recurrent-layers", 2, "--batch", 3, "--warmup", 2, "--sample", 5, "--validation-segments", 0),
]
COMPRESSIVE = [
    *("--model", "compressive", "--width", 16, "--layers", 2, "--heads", 2, "--head-width", 8, "--feed-forward", 32),
    *("--segment", 8, "--memory", 8, "--compressed-memory", 4, "--compression-rate", 2, "--batch", 3, "--warmup", 2),
    *("--sample", 0, "--validation-segments", 0),
]
MEMFORMER = [
    *("--model", "memformer", "--width", 16, "--encoder-layers", 1, "--decoder-layers", 1, "--heads", 2, "--head-width", 8),
    *("--feed-forward", 32, "--segment", 8, "--slots", 3, "--horizon", 3, "--batch", 3, "--warmup", 2, "--sample", 0),
    *("--validation-segments", 0),
]
MEMORIZING = [
    *("--model", "memorizing", "--width", 16, "--layers", 2, "--heads", 2, "--head-width", 8, "--feed-forward", 32),
    *("--segment", 8, "--memory-layer", 2, "--memory", 24, "--retrieved", 3, "--batch", 3, "--warmup", 2, "--sample", 0),
    *("--validation-segments", 0),
]
WINDOWED = [
    *("--model", "pretrained_recurrence", "--width", 16, "--layers", 2, "--heads", 2, "--feed-forward", 32, "--segment", 8),
    *("--max-positions", 12, "--horizon", 3, "--batch", 3, "--warmup", 2, "--sample", 0, "--validation-segments", 0),
]


def train(*argv):
    """Run train.py with these arguments."""
    training_script.main(*parse_training([str(argument) for argument in argv]))


def evaluate(*argv):
    """Run eval.py with these arguments."""
    evaluation_script.main(*parse([str(argument) for argument in argv]))


def saved(run):
    """The contents of a run's last checkpoint."""
    return load_checkpoint(checkpoint_path(run))


def equal(first, second):
    """Whether two saved values are the same to the bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second
