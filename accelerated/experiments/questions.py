"""The command `python -m accelerated.experiments.questions`: answers over several windows, Table 3 of Adding Recurrence.

A small RoBERTa is pretrained on the standard library, then fine-tuned on generated questions of two hops with disjoint windows and
with recurrence. With --train, --dev and --roberta it is RoBERTa itself on HotpotQA's files, with the paper's settings. On seed 0
each rate is tried, and validation chooses; the other seeds take the chosen one.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from accelerated.applications import reader, two_hops
from accelerated.applications.questions import KINDS, Question, exact_match, mean_scores, read_questions
from accelerated.applications.roberta import Roberta, load_published, published_config
from accelerated.applications.roberta_tokens import RobertaTokenizer, of_bpe, published_tokenizer
from accelerated.data.corpus import tokenised
from accelerated.data.sources import standard_library
from accelerated.data.tokenizers import train_bpe
from accelerated.experiments.experiment import Experiment, conduct, experiment_parser, parsed
from accelerated.experiments.table import markdown, mean_and_spread, wrapped
from accelerated.program.errors import InputError, run_program
from accelerated.program.files import default_data_dir
from accelerated.program.progress import Progress
from accelerated.training.log import figure_class, new_figure, save_figure

ROWS = {"disjoint": False, "recurrent": True}  # {row: whether a vector goes from window to window}
SIZES = {"width": 64, "layers": 3, "heads": 4, "feed_forward": 256, "segment": 48, "module_width": 64, "dropout": 0.0}
VOCABULARY = 2048  # tokens of the BPE that is learned
PRETRAINING = reader.Training(updates=600, batch=64, learning_rate=0.003)
UPDATES, BATCH, RATES = 400, 32, (0.0005, 0.001, 0.002)
QUESTIONS = {"train": 8000, "valid": 320, "test": 640}
PAPERS = {"rate": 2e-5, "epochs": 4, "questions": 30_000, "segment": 512}  # section 5.4


class Task(NamedTuple):
    """What the rows are trained and asked on."""

    model: Callable[[bool, int], Roberta]  # (recurrent, seed): pretrained
    tokenizer: RobertaTokenizer
    questions: dict[str, list[Question]]  # by split
    updates: int
    batch: int
    rates: Sequence[float]
