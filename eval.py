"""Evaluate a trained run, or continue a text with it: python eval.py --help. The reports are in accelerated/evaluation/."""

import argparse
import contextlib
import dataclasses
import difflib
import json
import sys
from pathlib import Path

import torch

from accelerated.data.config import check_carry_over, check_data
from accelerated.data.corpus import load_corpus
from accelerated.data.tokenizers import run_tokenizer
from accelerated.data.windows import SPLITS, lengths_of
from accelerated.evaluation import dynamic, frequency, generation, memories, overlap, positions, score
from accelerated.evaluation.report import TrainedRun, at_least
from accelerated.models import MODELS
from accelerated.program.errors import InputError, option_name, run_program
from accelerated.protocol import computing_in
from accelerated.training.checkpoint import load_checkpoint, load_parameters
from accelerated.training.folder import chosen_checkpoint
from accelerated.training.log import check_figure
from accelerated.training.options import OptionParser, add_data_dir
from accelerated.training.process import choose_device
from accelerated.training.settings import DEVICES, GPT2_MODEL, Settings, settings_from
from reference.pretrained_recurrence import POOLS

REPORTS = {
    "score": score.REPORT,
    "sample": generation.REPORT,
    "positions": positions.POSITIONS,
    "frequency": frequency.REPORT,
    "overlap": overlap.REPORT,
    "range": positions.RANGE,
    "attention": memories.ATTENTION,
    "compression": memories.COMPRESSION,
    "dynamic": dynamic.REPORT,
}
MODEL_OF_OPTION = {  # the only model that takes an option; all except new_window are fields of its config
    "memory": "compressive", "compressed_memory": "compressive",
    "segment": GPT2_MODEL, "pool": GPT2_MODEL, "new_window": GPT2_MODEL,
}  # fmt: skip


def overview() -> str:
    """The text of eval.py --help."""
    rows = [(f"python eval.py {name} {report.example}", report.help) for name, report in REPORTS.items()]
    lines = "\n".join(f"  {example:<55} {text}" for example, text in rows)
    return f"""Evaluate a trained model on documents, with its state carried through each of them; or continue a text.
RUN is a folder that train.py wrote.

{lines}

python eval.py RUN means python eval.py score RUN. Each report has its own options: python eval.py positions --help"""


def report_parser(name: str) -> OptionParser:
    """The parser of one report; it has only the options that the report uses."""
    report = REPORTS[name]
    usage = f"python eval.py {name} RUN{' [RUN ...]' if report.table else ''} [options]"
    about = {"description": f"Print {report.help}.", "epilog": f"example: python eval.py {name} {report.example}"}
    parser = OptionParser(prog=f"eval.py {name}", allow_abbrev=False, usage=usage, **about)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py wrote")
    report.add_options(parser)
    if report.clears:
        text = "start every segment from the initial state instead of the carried one"
        parser.add_argument("--clear-memory", action="store_true", help=text)
    if report.plots:
        parser.add_argument("--plot", metavar="FILE", help="draw it too: .png, .pdf or .svg (needs the extra plot)")
    if report.splits:
        parser.add_argument("--data", help="what to read, as for train.py's --data (default: what the run was trained on)")
        add_data_dir(parser)
        parser.add_argument("--split", choices=SPLITS, help=f"which split of it (default {' and '.join(report.splits)})")
        text = "carry memory from document to document; positions then count in all of a lane's text (default as trained)"
        parser.add_argument("--carry-over-documents", action=argparse.BooleanOptionalAction, help=text)
        parser.add_argument("--batch", type=at_least(1), metavar="B", help="lanes, documents read at a time (default the run's)")
    if report.model != GPT2_MODEL:
        for size in ("memory", "compressed_memory"):
            text = f"rows of {size.replace('_', ' ')} in each layer of a compressive model, 0 for none (default the run's)"
            parser.add_argument(option_name(size), type=int, metavar="ROWS", help=text)
    if report.model != "compressive":
        whose = "of a pretrained_recurrence model (default the run's)"
        parser.add_argument("--segment", type=int, metavar="T", help=f"window length {whose}")
        parser.add_argument("--pool", choices=POOLS, help=f"positions that are pooled in a window {whose}")
    parser.add_argument("--checkpoint", default="last", metavar="NAME", help="checkpoint: last, best or step-N (default last)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is one (default auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def refuse_options_of_other_reports(name: str, words: list[str]) -> None:
    """Raise InputError for an option that only other reports have.

    The report's parser would refuse it too; this message also names the reports that have it.
    """
    known = {report: report_parser(report)._option_string_actions for report in REPORTS}
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        takers = [report for report, options in known.items() if option in options]
        if takers and name not in takers:
            raise InputError(f"{option} is an option of eval.py {', '.join(takers)}, not of {name}; leave it out")


def parse(argv: list[str]) -> tuple[str, argparse.Namespace]:
    """Return (name of the report, its options) of a command line; raises InputError for what no run can do."""
    if argv[:1] in (["-h"], ["--help"]):
        print(overview())
        raise SystemExit
    named = bool(argv) and argv[0] in REPORTS
    name, rest = (argv[0], argv[1:]) if named else ("score", argv)
    refuse_options_of_other_reports(name, rest)
    if not named and argv and not argv[0].startswith("-") and not Path(argv[0]).exists():
        nearest = difflib.get_close_matches(argv[0], REPORTS, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"the reports are {', '.join(REPORTS)}"
        raise InputError(f"{argv[0]} is neither a run's folder nor a report; {advice}")
    options = report_parser(name).parse(rest)
    if len(options.runs) > 1 and not REPORTS[name].table:
        raise InputError(f"{len(options.runs)} runs were given; only eval.py overlap takes more than one")
    if getattr(options, "data", None):
        check_data(options.data)
    if getattr(options, "plot", None):
        check_figure(options.plot)
    return name, options


def evaluated_config(name: str, options: argparse.Namespace, settings: Settings) -> object:
    """The config to evaluate the run's model with: its own, changed by the options and the report."""
    report, trained = REPORTS[name], settings.model_config
    if report.model not in (None, settings.model):
        raise InputError(f"{name} is for {report.model} models, this is {settings.model}; give another run")
    given = {option: value for option, value in vars(options).items() if option in MODEL_OF_OPTION and value is not None}
    for option in given:
        if (model := MODEL_OF_OPTION[option]) != settings.model:
            raise InputError(f"{option_name(option)} is for {model} models, this is {settings.model}; leave it out")
    given.pop("new_window", None)
    config = report.config(trained, given, options)
    if settings.model == "compressive" and config.compressed_memory and not trained.compressed_memory:
        memories.check_untrained(config)
    return config


def open_trained_run(path: str, name: str, options: argparse.Namespace) -> TrainedRun:
    """Open the run at path, with its model ready to evaluate, but without documents."""
    file = chosen_checkpoint(path, options.checkpoint)
    checkpoint = load_checkpoint(file)
    settings = settings_from(checkpoint, file)
    device = choose_device(options.device, settings.training.dtype)
    torch.set_default_dtype(torch.float64 if settings.training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](evaluated_config(name, options, settings)).to(device)
    load_parameters(model, checkpoint["parameters"], file, unused=".compression.")
    lane_count = getattr(options, "batch", None) or settings.training.batch
    return TrainedRun(path, model.eval(), settings, checkpoint, run_tokenizer(path, settings.data), lane_count)


def open_documents(run: TrainedRun, options: argparse.Namespace, splits: tuple[str, ...]) -> TrainedRun:
    """Return the run with documents of --split, or else of `splits`; raises InputError if one has nothing to predict."""
    trained = run.settings.data
    data = options.data or trained.data
    if data == "recall" and run.tokenizer.name != "bytes":
        raise InputError(f"--data recall is made of bytes, the run's tokenizer is {run.tokenizer.name}; give other --data")
    check_carry_over(data, asked := options.carry_over_documents)
    carry_over = trained.carry_over_documents and data != "recall" if asked is None else asked
    documents = trained.documents if Path(data).is_dir() else "files"  # other data than the run's may be a file
    corpus = load_corpus(data, run.tokenizer, run.settings.recall, options.data_dir, documents)
    if data == trained.data and run.checkpoint.get("corpus") not in (None, corpus.digest):
        print(f"warning: {data} is no longer what the run was trained on; its splits may differ", file=sys.stderr)
    read = {split: corpus.splits[split] for split in ((options.split,) if options.split else splits)}
    for split, documents in read.items():
        if not lengths_of(documents).any():
            raise InputError(f"--split {split} of {data} has nothing to predict; choose another split")
    return run._replace(data=data, splits=read, carry_over=carry_over)


def heading(run: TrainedRun, cleared: bool) -> tuple[dict, list[str]]:
    """Return what is evaluated, and how: the first fields of the report's JSON, and its title lines."""
    config, trained = run.model.config, run.settings.model_config
    lines = [run.model.describe()]
    if run.settings.model == GPT2_MODEL and (differing := overlap.differences(config, trained)):
        lines.append(f"trained with {', '.join(differing)}")
    if run.settings.model == "compressive":
        now, then = (f"memory {c.memory}, compressed_memory {c.compressed_memory}" for c in (config, trained))
        lines += [f"evaluated with {now}; trained with {then}"] if now != then else []
    [split] = run.splits
    step = run.checkpoint["step"]
    carried = f"memory carried {'over documents' if run.carry_over else 'through each document'}"
    memory = "no memory" if score.carries_nothing(run.model) else "memory cleared at every segment" if cleared else carried
    memory += ", documents joined" if run.carry_over and memory != carried else ""
    lines.append(f"{run.settings.model} from {Path(run.path)}, step {step}, {split} split of {run.data}, {memory}")
    record = {"run": run.path, "model": run.settings.model, "step": step, "config": dataclasses.asdict(config)}
    return record | {"data": run.data, "split": split, "memory_cleared": cleared, "carry_over_documents": run.carry_over}, lines


def main(argv: list[str]) -> None:
    """Print the report that the command line asks for."""
    name, options = parse(argv)
    report = REPORTS[name]
    runs = [open_trained_run(path, name, options) for path in dict.fromkeys(options.runs)]  # each once
    if report.splits:
        data = list(dict.fromkeys(options.data or run.settings.data.data for run in runs))  # each once, in order
        if len(data) > 1:
            raise InputError(f"the runs read different data ({', '.join(data)}); give --data for all of them")
        runs = [open_documents(run, options, report.splits) for run in runs]
    results = []
    for run in runs:
        dtype = getattr(torch, run.settings.training.dtype)
        with contextlib.nullcontext() if report.exact else computing_in(run.model, dtype):
            results.append(report.run(run, options))
    record, lines = report.table(runs, results) if report.table else results[0]
    if report.splits and not report.table:
        about, title = heading(runs[0], getattr(options, "clear_memory", False))
        record, lines = about | record, title + lines
    record = json.loads(json.dumps(record), parse_constant=lambda name: None)  # JSON has no NaN and no infinity
    print(json.dumps(record) if options.json else "\n".join(lines))


if __name__ == "__main__":
    run_program("eval.py", main, sys.argv[1:])
