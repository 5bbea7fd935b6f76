"""Evaluate a trained run, or continue a text with it: python eval.py --help. evaluation/options.py names the reports."""

from accelerated.program.errors import begin_program, run_program

if __name__ == "__main__":  # before torch is imported, which takes seconds
    command = begin_program("eval.py", "accelerated.evaluation.options")

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from accelerated.data.config import DataConfig
from accelerated.data.corpus import load_corpus
from accelerated.data.windows import lengths_of
from accelerated.evaluation.options import REPORTS, models_by_size
from accelerated.evaluation.score import NAN, TrainedRun, carries_nothing
from accelerated.program.errors import InputError, option_name
from accelerated.protocol import computing_in
from accelerated.training.checkpoint import load_weights, open_model
from accelerated.training.fields import changed
from accelerated.training.process import choose_device
from accelerated.training.settings import Settings, settings_from


def function_at(place: str) -> Callable:
    """The function of a report, from its place below accelerated; other reports are not loaded."""
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"accelerated.{module}"), name)


def evaluated_config(name: str, options: argparse.Namespace, settings: Settings) -> object:
    """The config to evaluate the run's model with: its own, changed by the options and the report."""
    report, model, trained = REPORTS[name], settings.model, settings.model_config
    if report.model not in (None, model):
        raise InputError(f"{name} is for {report.model} models, this is {model}; give another run")
    sizes = {
        size: value
        for size in models_by_size()
        if (value := getattr(options, size, None)) is not None
    }
    for size, models in models_by_size().items():
        if size in sizes and model not in models:
            raise InputError(
                f"{option_name(size)} is for {' and '.join(models)} models, this is {model}; leave it out"
            )
    return (
        function_at(report.config)(trained, sizes, options)
        if report.config
        else changed(trained, sizes)
    )


def open_trained_run(path: str, name: str, options: argparse.Namespace) -> TrainedRun:
    """Open the run at path, with its model ready to evaluate, but without documents."""
    checkpoint = load_weights(path, options.checkpoint)
    settings = settings_from(checkpoint, path)
    torch.set_default_dtype(
        torch.float64 if settings.training.dtype == "float64" else torch.float32
    )
    config, device = evaluated_config(name, options, settings), choose_device(options.device)
    model, tokenizer = open_model(path, checkpoint, settings, config, device)
    lane_count = getattr(options, "batch", None) or settings.training.batch
    return TrainedRun(path, model, settings, checkpoint, tokenizer, lane_count)


def data_config(trained: DataConfig, data: str) -> DataConfig:
    """The DataConfig to read data with: the run's own, or that of other data, which is read whole."""
    return (
        trained
        if data == trained.data
        else dataclasses.replace(trained, data=data, training_documents=0)
    )


def open_documents(
    run: TrainedRun, options: argparse.Namespace, splits: tuple[str, ...]
) -> TrainedRun:
    """Return the run with documents of --split, or else of `splits`; raises InputError if one has nothing to predict."""
    trained, data = run.settings.data, options.data or run.settings.data.data
    if not data:
        raise InputError(f"{run.path} has no text of its own; give --data")
    if data == "recall" and run.tokenizer.name != "bytes":
        raise InputError(
            f"--data recall is made of bytes, the run's tokenizer is {run.tokenizer.name}; give other --data"
        )
    carried, asked = trained.carry_over_documents and data != "recall", options.carry_over_documents
    if asked and data == "recall":
        raise InputError(
            "--carry-over-documents is for texts; an answer of --data recall stands in no document; leave it out"
        )
    given = {
        name: value
        for name in ("distance", "pairs")
        if (value := getattr(options, f"recall_{name}")) is not None
    }
    if given and data != "recall":
        raise InputError(
            f"--recall-{next(iter(given))} needs --data recall, and the data is {data}; leave it out"
        )
    recall = changed(run.settings.recall, given, "recall_")
    corpus = load_corpus(data_config(trained, data), run.tokenizer, recall, options.data_dir)
    if data == trained.data and run.checkpoint["corpus"] not in ("", corpus.digest):
        print(
            f"warning: {data} is no longer what the run was trained on; its splits may differ",
            file=sys.stderr,
        )
    opened = {
        split: corpus.splits[split] for split in ((options.split,) if options.split else splits)
    }
    for split, documents in opened.items():
        if not lengths_of(documents).any():
            raise InputError(
                f"--split {split} of {data} has nothing to predict; choose another split"
            )
    return run._replace(data=data, splits=opened, carry_over=carried if asked is None else asked)


def heading(run: TrainedRun, cleared: bool) -> tuple[dict, list[str]]:
    """Return what is evaluated, and how: the first fields of the report's JSON, and its title lines."""
    config, trained, whole = (
        run.model.config,
        run.settings.model_config,
        run.splits[run.split].whole,
    )
    differing = [
        size for size in models_by_size() if getattr(config, size, 0) != getattr(trained, size, 0)
    ]
    lines = (
        [f"trained with {', '.join(f'{size} {getattr(trained, size)}' for size in differing)}"]
        if differing
        else []
    )
    step, carried = (
        run.checkpoint["step"],
        f"memory carried {'over documents' if run.carry_over else 'through each document'}",
    )
    memory = (
        "no memory"
        if carries_nothing(run.model)
        else "memory cleared at every segment"
        if cleared
        else carried
    )
    memory += ", documents joined" if run.carry_over and memory != carried else ""
    read = f"{'' if whole else 'a part of '}{run.split} split of {run.data}"
    title = f"{run.settings.model} from {Path(run.path)}, step {step:,}, {read}, {memory}"
    record = {
        "run": run.path,
        "model": run.settings.model,
        "step": step,
        "config": dataclasses.asdict(config),
    }
    record |= {"data": run.data, "split": run.split, "whole_split": whole}
    record |= {"memory_cleared": cleared, "carry_over_documents": run.carry_over}
    return record, [run.model.describe(), *lines, title]


def has_nan(value: object) -> bool:
    """Whether a report's record holds a NaN of the model; rates without a scored token are NaN too and do not count."""
    if isinstance(value, dict):
        return value.get("tokens") != 0 and any(map(has_nan, value.values()))
    return any(map(has_nan, value)) if isinstance(value, list) else value != value


def main(name: str, options: argparse.Namespace) -> None:
    """Print the report of that name."""
    report, runs = REPORTS[name], list(dict.fromkeys(options.runs))  # each once
    function, exact = function_at(report.function), report.exact or not report.opens
    if report.opens:
        runs = [open_trained_run(path, name, options) for path in runs]
    if report.splits:
        if len(data := {options.data or run.settings.data.data for run in runs}) > 1:
            raise InputError(
                f"the runs read different data ({', '.join(sorted(data))}); give --data for all of them"
            )
        runs = [open_documents(run, options, report.splits) for run in runs]
    with contextlib.ExitStack() as stack:
        for run in () if exact else runs:
            stack.enter_context(
                computing_in(run.model, getattr(torch, run.settings.training.dtype))
            )
        record, lines = function(runs if report.several else runs[0], options)
    if has_nan(record):
        raise InputError(NAN)
    if report.splits and not report.several:
        about, title = heading(runs[0], getattr(options, "clear_memory", False))
        record, lines = about | record, title + lines
    record = json.loads(
        json.dumps(record), parse_constant=lambda name: None
    )  # JSON has no NaN and no infinity
    for line in [json.dumps(record)] if options.json else lines:
        print(line)


if __name__ == "__main__":
    run_program("eval.py", main, *command)
