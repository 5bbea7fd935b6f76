"""Evaluate a trained run, or continue a text with it: python eval.py --help. The reports are in accelerated/evaluation/."""

import argparse
import dataclasses
import difflib
import json
import math
import sys
from pathlib import Path

import torch

from accelerated.data.corpus import check_data, default_data_dir, load_corpus
from accelerated.data.tokenizers import run_tokenizer
from accelerated.data.windows import SPLITS, lengths_of
from accelerated.errors import InputError, option_name, run_program
from accelerated.evaluation import dynamic, frequency, generation, memories, overlap, positions, score, temporal_range
from accelerated.evaluation.score import Run, at_least, carries_nothing
from accelerated.models import MODELS
from accelerated.training.checkpoint import chosen_checkpoint, load_checkpoint, load_parameters
from accelerated.training.log import check_figure
from accelerated.training.options import OptionParser, add_data_dir
from accelerated.training.process import autocast, choose_device
from accelerated.training.settings import DEVICES, GPT2_MODEL, Settings, settings_from
from reference.pretrained_recurrence import POOLS

REPORTS = {
    "score": score.REPORT,
    "sample": generation.REPORT,
    "positions": positions.REPORT,
    "frequency": frequency.REPORT,
    "overlap": overlap.REPORT,
    "range": temporal_range.REPORT,
    "attention": memories.ATTENTION,
    "compression": memories.COMPRESSION,
    "dynamic": dynamic.REPORT,
}
FORMERLY = {
    "--by-position": "positions RUN", "--by-frequency": "frequency RUN", "--temporal-range": "range RUN --segments K",
    "--attention-buckets": "attention RUN", "--compression-by-layer": "compression RUN", "--sample": "sample RUN --tokens N",
    "--dynamic-evaluation": "dynamic RUN --learning-rate RATE", "--overlap": "overlap RUN --overlaps O,...",
}  # fmt: skip
OF_MODEL = {"memory": "compressive", "compressed_memory": "compressive", "segment": GPT2_MODEL, "pool": GPT2_MODEL}


def overview() -> str:
    """What eval.py --help prints."""
    rows = [(f"python eval.py {name} {report.example}", report.help) for name, report in REPORTS.items()]
    lines = "\n".join(f"  {example:<55} {text}" for example, text in rows)
    return f"""Report what a trained model predicts of documents, its state carried through each; or continue a text.
RUN is a folder that train.py wrote.

{lines}

python eval.py RUN alone scores. Each report has options of its own: python eval.py positions --help"""


def report_parser(name: str) -> OptionParser:
    """The parser of one report, which takes only what the report has a use for."""
    report, several = REPORTS[name], name == "overlap"
    usage = f"python eval.py {name} RUN{' [RUN ...]' if several else ''} [options]"
    epilog = f"example: python eval.py {name} {report.example}"
    parser = OptionParser(
        prog=f"eval.py {name}", allow_abbrev=False, usage=usage, description=f"Print {report.help}.", epilog=epilog
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="one or more folders that train.py wrote" if several else "folder that train.py wrote",
    )
    report.add_options(parser)
    if report.plots:
        parser.add_argument("--plot", metavar="FILE", help="draw it too: .png, .pdf or .svg (needs the extra plot)")
    if report.splits:
        parser.add_argument("--data", help="what to read: all that train.py's --data takes (default what the run trained on)")
        add_data_dir(parser)
        parser.add_argument("--split", choices=SPLITS, help=f"which part of it (default {' and '.join(report.splits)})")
        parser.add_argument("--batch", type=at_least(1), metavar="B", help="lanes read at a time (default the run's)")
    for size in ("memory", "compressed_memory") if report.model != GPT2_MODEL else ():
        text = f"rows of {size.replace('_', ' ')} in each layer of a compressive model, 0 for none (default the run's)"
        parser.add_argument(option_name(size), type=int, metavar="ROWS", help=text)
    if report.model != "compressive":
        of = "of a pretrained_recurrence model (default the run's)"
        parser.add_argument("--segment", type=int, metavar="T", help=f"window {of}")
        parser.add_argument("--pool", choices=POOLS, help=f"positions that are pooled in a window {of}")
    parser.add_argument(
        "--checkpoint", default="last", metavar="NAME", help="which of a run's checkpoints: last, best or step-N (default last)"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is one (default auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def parse(argv: list[str]) -> tuple[str, argparse.Namespace]:
    """(name of the report, its options) of a command line; raises InputError for what is impossible whatever the run."""
    if argv[:1] in (["-h"], ["--help"]):
        print(overview())
        raise SystemExit
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in REPORTS else ("score", argv)
    for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
        if option in FORMERLY:
            raise InputError(f"{option} is a command of its own now: python eval.py {FORMERLY[option]} (see eval.py --help)")
        takers = [other for other in REPORTS if option in report_parser(other)._option_string_actions]
        if takers and name not in takers:
            raise InputError(f"{option} is an option of eval.py {', '.join(takers)}, not of {name}; leave it out")
    if rest is argv and argv and not argv[0].startswith("-") and not Path(argv[0]).exists():
        nearest = difflib.get_close_matches(argv[0], REPORTS, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"the reports are {', '.join(REPORTS)}"
        raise InputError(f"{argv[0]} is neither a run's folder nor a report; {advice}")
    options = report_parser(name).parse(rest)
    if len(options.runs) > 1 and name != "overlap":
        raise InputError(f"{len(options.runs)} runs were given; only eval.py overlap takes more than one")
    if getattr(options, "data", None):
        check_data(options.data)
    if getattr(options, "plot", None):
        check_figure(options.plot)
    return name, options


def model_config(name: str, options: argparse.Namespace, settings: Settings):
    """The run's model config with what the options and the report change."""
    report, trained = REPORTS[name], settings.model_config
    if report.model not in (None, settings.model):
        raise InputError(f"{name} is for {report.model} models, this is {settings.model}; give another run")
    for option, model in (OF_MODEL | {"new_window": GPT2_MODEL}).items():
        if getattr(options, option, None) is not None and model != settings.model:
            raise InputError(f"{option_name(option)} is for {model} models, this is {settings.model}; leave it out")
    sizes = {size: getattr(options, size) for size in OF_MODEL if getattr(options, size, None) is not None}
    config = report.config(trained, sizes, options)
    if settings.model == "compressive" and config.compressed_memory and not trained.compressed_memory:
        memories.check_untrained(config)
    return config


def open_run(path: str, name: str, options: argparse.Namespace, device: torch.device) -> Run:
    """The trained model, ready to evaluate, with what it was trained as."""
    checkpoint = chosen_checkpoint(path, options.checkpoint)
    contents = load_checkpoint(checkpoint, device)
    settings = settings_from(contents, checkpoint)
    torch.set_default_dtype(torch.float64 if settings.training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](model_config(name, options, settings)).to(device)
    load_parameters(model, contents["parameters"], checkpoint, unused=".compression.")
    lanes = getattr(options, "batch", None) or settings.training.batch
    return Run(path, model.eval(), settings, contents, run_tokenizer(path, settings.data), lanes)


def open_documents(run: Run, options: argparse.Namespace, splits: tuple[str, ...]) -> Run:
    """The run with what it reads: --split, or else these splits; raises InputError if one has nothing to predict."""
    trained = run.settings.data
    data = options.data or trained.data
    if data == "recall" and run.tokenizer.name != "bytes":
        raise InputError(f"--data recall is made of bytes, the run's tokenizer is {run.tokenizer.name}; give other --data")
    documents = trained.documents if Path(data).is_dir() else "files"  # other data than the run's may be a file
    corpus = load_corpus(data, run.tokenizer, run.settings.recall, options.data_dir, documents)
    if data == trained.data and run.contents.get("corpus") not in (None, corpus.digest):
        print(f"warning: {data} is no longer what the run was trained on; its splits may be others", file=sys.stderr)
    read = {split: corpus.splits[split] for split in ((options.split,) if options.split else splits)}
    for split, documents in read.items():
        if not lengths_of(documents).any():
            raise InputError(f"--split {split} of {data} has nothing to predict; choose another split")
    return run._replace(data=data, splits=read)


def heading(run: Run, cleared: bool) -> tuple[dict, list[str]]:
    """What is evaluated, and how: (record, lines)."""
    config, trained = run.model.config, run.settings.model_config
    lines, notes = [run.model.describe()], ()
    if run.settings.model == GPT2_MODEL and (notes := overlap.differences(config, trained)):
        lines.append(f"trained with {', '.join(notes)}")
    if run.settings.model == "compressive":
        now, then = (f"memory {c.memory}, compressed_memory {c.compressed_memory}" for c in (config, trained))
        lines += [f"evaluated with {now}; trained with {then}"] if now != then else []
    [split], step = run.splits, run.contents["step"]
    memory = "memory cleared at every segment" if cleared else "memory carried through each document"
    memory = "no memory" if carries_nothing(run.model) else memory
    lines.append(f"{run.settings.model} from {Path(run.path)}, step {step}, {split} split of {run.data}, {memory}")
    record = {"run": run.path, "model": run.settings.model, "step": step, "config": dataclasses.asdict(config)}
    return record | {"data": run.data, "split": split, "memory_cleared": cleared}, lines


def for_json(value):
    """value, with None for NaN and infinite numbers: JSON has none."""
    if isinstance(value, dict):
        return {name: for_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: list[str]) -> None:
    name, options = parse(argv)
    report, device = REPORTS[name], choose_device(options.device)
    runs = [open_run(path, name, options, device) for path in dict.fromkeys(options.runs)]
    if report.splits:
        data = {options.data or run.settings.data.data: None for run in runs}
        if len(data) > 1:
            raise InputError(f"the runs read different data ({', '.join(data)}); say with --data what all are to read")
        options.data_dir = Path(options.data_dir or default_data_dir())
        runs = [open_documents(run, options, report.splits) for run in runs]
    with autocast("float32" if report.exact else runs[0].settings.training.dtype, device):
        record, lines = report.run(*runs, options=options)
    if report.splits and name != "overlap":
        about, title = heading(runs[0], getattr(options, "clear_memory", False))
        record, lines = about | record, title + lines
    print(json.dumps(for_json(record)) if options.json else "\n".join(lines))


if __name__ == "__main__":
    run_program("eval.py", main)
