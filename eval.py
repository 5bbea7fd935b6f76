"""Evaluate a trained run, or continue a text with it: python eval.py --help. The reports are in accelerated/evaluation/."""

from accelerated.program.errors import begin_program, run_program

if __name__ == "__main__":  # before torch is imported, which takes seconds
    command = begin_program("eval.py", "accelerated.evaluation.options")

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import torch

from accelerated.data.config import CORPORA, DataConfig, check_carry_over
from accelerated.data.corpus import load_corpus
from accelerated.data.recall import RecallConfig
from accelerated.data.tokenizers import run_tokenizer
from accelerated.data.windows import lengths_of
from accelerated.evaluation import export, generation, overlap, positions, score, view
from accelerated.evaluation.options import REPORTS
from accelerated.lab.reports import dynamic, frequency, memories, topics
from accelerated.lab.reports import range as temporal_range
from accelerated.models import model_class
from accelerated.program.errors import InputError, option_name
from accelerated.protocol import computing_in
from accelerated.training.checkpoint import check_tokenizer, load_checkpoint, load_parameters
from accelerated.training.folder import chosen_checkpoint
from accelerated.training.log import report_curves
from accelerated.training.options import changed
from accelerated.training.process import choose_device
from accelerated.training.settings import GPT2_MODEL, Settings, settings_from

FUNCTIONS = {  # (run, options) -> (record, lines): plain values for --json, and the text to print; of overlap, rows for its table
    "score": score.report,
    "sample": generation.report,
    "positions": positions.report_positions,
    "frequency": frequency.report,
    "overlap": overlap.report,
    "range": temporal_range.report,
    "attention": memories.report_attention,
    "compression": memories.report_compression,
    "topics": topics.report,
    "dynamic": dynamic.report,
    "export": export.report,
    "view": view.report,
    "curves": report_curves,  # (paths of runs, options)
}
CONFIGS = {"overlap": overlap.first_config, "compression": memories.reconstructing}  # instead of `changed`: what to evaluate with
MODELS_OF_OPTION = {  # the only models that take an option; all except new_window are fields of their configs
    "memory": ("compressive", "memorizing"), "compressed_memory": ("compressive",),
    "segment": (GPT2_MODEL,), "pool": (GPT2_MODEL,), "new_window": (GPT2_MODEL,),
}  # fmt: skip


def evaluated_config(name: str, options: argparse.Namespace, settings: Settings) -> object:
    """The config to evaluate the run's model with: its own, changed by the options and the report."""
    model, trained = REPORTS[name].model, settings.model_config
    if model not in (None, settings.model):
        raise InputError(f"{name} is for {model} models, this is {settings.model}; give another run")
    given = {option: value for option, value in vars(options).items() if option in MODELS_OF_OPTION and value is not None}
    for option in given:
        if settings.model not in (models := MODELS_OF_OPTION[option]):
            raise InputError(
                f"{option_name(option)} is for {' and '.join(models)} models, this is {settings.model}; leave it out"
            )
    given.pop("new_window", None)
    config = CONFIGS[name](trained, given, options) if name in CONFIGS else changed(trained, given)
    if settings.model == "compressive" and config.compressed_memory and not trained.compressed_memory:
        memories.check_untrained(config)
    return config


def open_trained_run(path: str, name: str, options: argparse.Namespace) -> score.TrainedRun:
    """Open the run at path, with its model ready to evaluate, but without documents."""
    file = chosen_checkpoint(path, options.checkpoint)
    checkpoint = load_checkpoint(file)
    settings = settings_from(checkpoint, file)
    device = choose_device(options.device, settings.training.dtype)
    torch.set_default_dtype(torch.float64 if settings.training.dtype == "float64" else torch.float32)
    model = model_class(settings.model)(evaluated_config(name, options, settings)).to(device)
    load_parameters(model, checkpoint["parameters"], file, unused=(".compression.", ".memory_gate"))
    for parameter, values in model.state_dict().items():
        if not values.isfinite().all():
            raise InputError(f"{file}: {parameter} has NaN or infinite values; give another --checkpoint, or train again")
    score.check_fields(model, getattr(options, "clear_memory", False))
    check_tokenizer(tokenizer := run_tokenizer(path, settings.data), checkpoint, path)
    if REPORTS[name].text and not tokenizer.spells_text:
        raise InputError(f"{name} is about text, and {path} has learned recordings; give another run")
    lane_count = getattr(options, "batch", None) or settings.training.batch
    return score.TrainedRun(path, model.eval(), settings, checkpoint, tokenizer, lane_count)


def data_config(trained: DataConfig, data: str) -> DataConfig:
    """The DataConfig to read data with: the run's own, as far as it can apply to other data."""
    if data == trained.data:
        return trained
    if data in CORPORA or not Path(data).exists():
        return DataConfig(data)
    whole = dataclasses.replace(trained, data=data, training_documents=0, validation_tokens=0)
    return whole if Path(data).is_dir() else dataclasses.replace(whole, documents="files")


def recall_config(settings: Settings, data: str, options: argparse.Namespace) -> RecallConfig:
    """The recall task to read: the run's own, at the given distance, with the given number of facts."""
    given = {"distance": options.recall_distance, "pairs": options.recall_pairs}
    asked = {name: value for name, value in given.items() if value is not None}
    if asked and data != "recall":
        raise InputError(f"--recall-{next(iter(asked))} is of --data recall, this is {data}; leave one of them out")
    return changed(settings.recall, asked, "recall_")


def open_documents(run: score.TrainedRun, options: argparse.Namespace, splits: tuple[str, ...]) -> score.TrainedRun:
    """Return the run with documents of --split, or else of `splits`; raises InputError if one has nothing to predict."""
    trained = run.settings.data
    data = options.data or trained.data
    if data == "recall" and run.tokenizer.name != "bytes":
        raise InputError(f"--data recall is made of bytes, the run's tokenizer is {run.tokenizer.name}; give other --data")
    if not (run.tokenizer.spells_text or Path(data).exists()):
        raise InputError(f"{run.path} has learned recordings, and --data {data} is text; give a .wav or a folder of them")
    check_carry_over(data, asked := options.carry_over_documents)
    carry_over = trained.carry_over_documents and data != "recall" if asked is None else asked
    config = data_config(trained, data)
    corpus = load_corpus(config, run.tokenizer, recall_config(run.settings, data, options), options.data_dir)
    if data == trained.data and run.checkpoint["corpus"] not in ("", corpus.digest):
        print(f"warning: {data} is no longer what the run was trained on; its splits may differ", file=sys.stderr)
    read = {split: corpus.splits[split] for split in ((options.split,) if options.split else splits)}
    for split, documents in read.items():
        if not lengths_of(documents).any():
            raise InputError(f"--split {split} of {data} has nothing to predict; choose another split")
    return run._replace(data=data, splits=read, carry_over=carry_over)


def heading(run: score.TrainedRun, cleared: bool | tuple[str, ...]) -> tuple[dict, list[str]]:
    """Return what is evaluated, and how: the first fields of the report's JSON, and its title lines."""
    config, trained = run.model.config, run.settings.model_config
    lines = [run.model.describe()]
    if run.settings.model == GPT2_MODEL and (differing := overlap.differences(config, trained)):
        lines.append(f"trained with {', '.join(differing)}")
    if run.settings.model == "compressive":
        now, then = (f"memory {c.memory}, compressed_memory {c.compressed_memory}" for c in (config, trained))
        lines += [f"evaluated with {now}; trained with {then}"] if now != then else []
    step = run.checkpoint["step"]
    carried = f"carried {'over documents' if run.carry_over else 'through each document'}"
    memory = "no memory" if score.carries_nothing(run.model) else f"memory {carried}"
    if cleared and memory != "no memory":
        memory = f"{score.cleared_words(cleared)} at every segment" + ("" if cleared is True else f", the rest {carried}")
    memory += ", documents joined" if run.carry_over and carried not in memory else ""
    part = "" if run.splits[run.split].whole else "a part of "
    lines.append(f"{run.settings.model} from {Path(run.path)}, step {step:,}, {part}{run.split} split of {run.data}, {memory}")
    record = {"run": run.path, "model": run.settings.model, "step": step, "config": dataclasses.asdict(config)}
    record |= {"data": run.data, "split": run.split, "whole_split": run.splits[run.split].whole}
    return record | {"memory_cleared": cleared, "carry_over_documents": run.carry_over}, lines


def evaluated(name: str, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The report of that name: plain values, and lines to print."""
    report, paths = REPORTS[name], list(dict.fromkeys(options.runs))  # each once
    if not report.opens:
        return FUNCTIONS[name](paths, options)
    runs = [open_trained_run(path, name, options) for path in paths]
    if report.splits:
        data = list(dict.fromkeys(options.data or run.settings.data.data for run in runs))  # each once, in order
        if len(data) > 1:
            raise InputError(f"the runs read different data ({', '.join(data)}); give --data for all of them")
        runs = [open_documents(run, options, report.splits) for run in runs]
    results = []
    for run in runs:
        dtype = getattr(torch, run.settings.training.dtype)
        with contextlib.nullcontext() if report.exact else computing_in(run.model, dtype):
            results.append(FUNCTIONS[name](run, options))
    record, lines = overlap.table(runs, results) if report.several else results[0]
    if report.splits and not report.several:
        about, title = heading(runs[0], getattr(options, "clear_memory", False))
        record, lines = about | record, title + lines
    return record, lines


def main(name: str, options: argparse.Namespace) -> None:
    """Print the report of that name."""
    record, lines = evaluated(name, options)
    record = json.loads(json.dumps(record), parse_constant=lambda name: None)  # JSON has no NaN and no infinity
    print(json.dumps(record) if options.json else "\n".join(lines))


if __name__ == "__main__":
    run_program("eval.py", main, *command)
