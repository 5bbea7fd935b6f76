"""Evaluate a trained run, or continue a text with it: python eval.py --help.

evaluation/options.py names the reports.
"""

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

import torch

from accelerated.data.config import HUB, DataConfig
from accelerated.data.corpus import load_corpus
from accelerated.data.recall import RecallConfig
from accelerated.data.windows import lengths_of
from accelerated.evaluation.options import RECALL_SIZES, REPORTS, Report, models_by_size
from accelerated.evaluation.score import Answer, TrainedRun, check_numbers
from accelerated.presets import ModelConfig
from accelerated.program.errors import InputError, option_name
from accelerated.protocol import computing_in
from accelerated.training.checkpoint import load_weights, open_model, parameter_type
from accelerated.training.fields import changed
from accelerated.training.process import choose_device
from accelerated.training.settings import Settings, settings_from


def main(name: str, options: argparse.Namespace) -> None:
    """Print the report of that name."""
    report = REPORTS[name]
    paths = dict.fromkeys(options.runs)  # each once
    runs = [open_trained_run(path, name, options) for path in paths]
    if report.splits:
        check_same_data(runs, options)
        runs = [open_documents(run, options, report.splits) for run in runs]
    record, lines = run_report(report, runs, options)
    check_numbers(record)

    # JSON has no NaN and no infinity
    record = json.loads(json.dumps(record), parse_constant=lambda name: None)
    if options.json:
        lines = [json.dumps(record)]
    for line in lines:
        print(line)
    if getattr(options, "plot", None):
        print(f"saved {options.plot}", file=sys.stderr)


def run_report(report: Report, runs: list[TrainedRun], options: argparse.Namespace) -> Answer:
    """What a report says of opened runs; one of a single split begins with what was read."""
    function = function_at(report.function)
    with contextlib.ExitStack() as stack:
        for run in runs:
            if not report.exact:
                dtype = getattr(torch, run.settings.training.dtype)
                stack.enter_context(computing_in(run.model, dtype))
        record, lines = function(runs if report.several else runs[0], options)
    if report.splits and not report.several:
        cleared = getattr(options, "clear_memory", False)
        record = runs[0].about(cleared) | record
        lines = [*heading(runs[0], cleared), *lines]
    return record, lines


def function_at(place: str) -> Callable:
    """The function of a report, from its place below accelerated; other reports are not loaded."""
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"accelerated.{module}"), name)


def open_trained_run(path: str, name: str, options: argparse.Namespace) -> TrainedRun:
    """Open the run at path, with its model ready to evaluate, but without documents."""
    checkpoint = load_weights(path, options.checkpoint)
    settings = settings_from(checkpoint, path)
    torch.set_default_dtype(parameter_type(settings))
    config = evaluated_config(name, options, settings)
    device = choose_device(options.device)
    model, tokenizer = open_model(path, checkpoint, settings, config, device)
    lane_count = getattr(options, "batch", None) or settings.training.batch
    return TrainedRun(path, model, settings, checkpoint, tokenizer, lane_count)


def evaluated_config(name: str, options: argparse.Namespace, settings: Settings) -> ModelConfig:
    """The config to evaluate the run's model with: its own, as the options and report change it."""
    report = REPORTS[name]
    model = settings.model
    if report.model not in (None, model):
        raise InputError(f"{name} is for {report.model} models, this is {model}; give another run")
    sizes = {}
    for size, models in models_by_size().items():
        value = getattr(options, size, None)
        if value is None:
            continue
        if model not in models:
            raise InputError(
                f"{option_name(size)} is for {' and '.join(models)} models, this is {model}; "
                "leave it out"
            )
        if getattr(settings.model_config, "memories", ()):
            raise InputError(
                f"{option_name(size)} cannot change a run's --memories, rows of each layer; "
                "leave it out"
            )
        sizes[size] = value
    if report.config:
        return function_at(report.config)(settings.model_config, sizes, options)
    return changed(settings.model_config, sizes)


def check_same_data(runs: list[TrainedRun], options: argparse.Namespace) -> None:
    """Raise InputError if the runs read different data and --data does not say which to read."""
    data = {options.data or run.settings.data.data for run in runs}
    if len(data) > 1:
        raise InputError(
            f"the runs read different data ({', '.join(sorted(data))}); give --data for all of them"
        )


def open_documents(
    run: TrainedRun, options: argparse.Namespace, splits: tuple[str, ...]
) -> TrainedRun:
    """Return the run with documents of --split, or else of `splits`.

    Raises InputError if one has nothing to predict.
    """
    trained = run.settings.data
    data = options.data or trained.data
    if not data:
        raise InputError(f"{run.path} has no text of its own; give --data")
    carry_over = options.carry_over_documents
    if data == "recall":
        check_recall(run, carry_over)
    elif carry_over is None:
        carry_over = trained.carry_over_documents
    recall = recall_config(run, data, options)
    corpus = load_corpus(data_config(trained, data), run.tokenizer, recall, options.data_dir)
    if data == trained.data and run.checkpoint["corpus"] not in ("", corpus.digest):
        print(
            f"warning: {data} is no longer what the run was trained on; its splits may differ",
            file=sys.stderr,
        )

    opened = {}
    for split in (options.split,) if options.split else splits:
        opened[split] = corpus.splits[split]
        if not lengths_of(opened[split]).any():
            raise InputError(
                f"--split {split} of {data} has nothing to predict; choose another split"
            )
    return run._replace(data=data, splits=opened, carry_over=bool(carry_over))


def check_recall(run: TrainedRun, carry_over: bool | None) -> None:
    """Raise InputError if the run cannot read --data recall, or if its documents were joined."""
    if run.tokenizer.name != "bytes":
        raise InputError(
            f"--data recall is made of bytes, the run's tokenizer is {run.tokenizer.name}; "
            "give other --data"
        )
    if carry_over:
        raise InputError(
            "--carry-over-documents is for texts; "
            "an answer of --data recall stands in no document; leave it out"
        )


def recall_config(run: TrainedRun, data: str, options: argparse.Namespace) -> RecallConfig:
    """The sizes of --data recall as the run was trained, changed by the options."""
    given = {}
    for name in RECALL_SIZES:
        value = getattr(options, f"recall_{name}")
        if value is None:
            continue
        if data != "recall":
            raise InputError(
                f"--recall-{name} needs --data recall, and the data is {data}; leave it out"
            )
        given[name] = value
    return changed(run.settings.recall, given, "recall_")


def data_config(trained: DataConfig, data: str) -> DataConfig:
    """The DataConfig to read data with: the run's own; other data is read whole."""
    if data == trained.data:
        return trained
    column = trained.text_column if data.startswith(HUB) else "text"
    return dataclasses.replace(trained, data=data, text_column=column, training_documents=0)


def heading(run: TrainedRun, cleared: bool) -> list[str]:
    """What is evaluated, and how: the title lines of a report."""
    lines = [run.model.describe()]
    trained = run.settings.model_config
    differing = []
    for size in models_by_size():
        value = getattr(trained, size, 0)
        if getattr(run.model.config, size, 0) != value:
            differing.append(f"{size} {value}")
    if differing:
        lines.append(f"trained with {', '.join(differing)}")

    part = "" if run.splits[run.split].whole else "a part of "
    read = f"{part}{run.split} split of {run.data}"
    step = f"step {run.checkpoint['step']:,}"
    if "file" in run.checkpoint:
        step = f"{run.checkpoint['file']} of {step}"
    lines.append(f"{run.settings.model} from {run.path}, {step}, {read}, {run.memory(cleared)}")
    return lines


if __name__ == "__main__":
    run_program("eval.py", main, *command, heard=True)
