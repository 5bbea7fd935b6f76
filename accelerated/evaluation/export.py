"""eval.py export: a run as a folder that other programs read, and that --init takes back.

model.safetensors has the parameters by the reference's names, config.json the settings. A tokenizer of the run's own has a file
of its own; one that was learned is also in tokenizer.json, for the package tokenizers. gpt2/ has the GPT-2 part of a model, as
the package transformers loads it. README.md is the model card. config.json is written last: a folder without it is not whole.
"""

import argparse
import shlex
from pathlib import Path

import torch

from accelerated.data.tokenizers import BpeTokenizer, merges_of, symbols_of, tokenizers_package
from accelerated.evaluation.score import TrainedRun
from accelerated.models import presets_of
from accelerated.presets.gpt2_weights import described_gpt2, of_ours, safetensors_package
from accelerated.program.errors import InputError, counted
from accelerated.program.files import disk_errors, file_checksum, written_whole
from accelerated.training.folder import EXPORT, SETTINGS, WEIGHTS, write_settings
from accelerated.training.log import read_metrics
from accelerated.training.options import options_of
from accelerated.training.settings import settings_contents

ADVICE = "give another FOLDER"
MEASURED = {  # in a record of the log: the row of the model card
    "validation_bits_per_byte": "| validation, bits per byte | {:.4f} |",
    "validation_loss": "| validation, nats per token | {:.4f} |",
    "cleared_bits_per_byte": "| the same, memory cleared at each segment | {:.4f} bits per byte |",
    "validation_tokens": "| tokens that were validated | {:,} |",
}


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Write the folder; the record has its path and files. Raises InputError if something stands there."""
    folder, parameters = Path(options.folder), run.model.state_dict()
    has_gpt2 = getattr(presets_of(run.settings.model), "TAKES_GPT2", False)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty; {ADVICE}, nothing is overwritten")
    safetensors_package()
    if run.settings.data.train_bpe:
        tokenizers_package()
    with disk_errors(folder, ADVICE):
        folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, parameters)
    write_tokenizer(folder, run)
    if has_gpt2:
        write_gpt2(folder / "gpt2", run)
    card = model_card(run, has_gpt2)
    with written_whole(folder / "README.md", ADVICE) as path:
        path.write_text(card)
    about = {"format": EXPORT, "step": run.checkpoint["step"], "tokenizer": run.tokenizer.fingerprint}
    about |= {"sha256": file_checksum(folder / WEIGHTS)}  # --init checks it
    write_settings(folder, about | settings_contents(run.settings), ADVICE)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    size = sum(value.numel() for value in parameters.values())
    lines = [f"{run.settings.model}, {size:,} parameters, step {about['step']:,}, in {folder}: {', '.join(files)}"]
    lines.append(f"train on from there with: python train.py --init {shlex.quote(str(folder))}")
    return {"folder": str(folder), "files": files, "parameters": size}, lines


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write {name: tensor} as safetensors."""
    from safetensors.torch import save_file

    with written_whole(path, ADVICE) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})


def write_tokenizer(folder: Path, run: TrainedRun) -> None:
    """Write a tokenizer of the run's own, and what the package tokenizers reads if that package learned it."""
    if run.settings.data.tokenizer_file:
        run.tokenizer.save(folder)
    if run.settings.data.train_bpe:
        with written_whole(folder / "tokenizer.json", ADVICE) as path:
            tokenizer_json(run.tokenizer).save(str(path))


def tokenizer_json(tokenizer: BpeTokenizer) -> object:
    """The same BPE as a Tokenizer of the package tokenizers."""
    tokenizers, symbols = tokenizers_package(), symbols_of(tokenizer.spellings)
    merges = [(symbols[left], symbols[right]) for left, right in merges_of(tokenizer.spellings)]
    vocabulary = {symbols[token]: rank for rank, token in enumerate(tokenizer.spellings)}
    same = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    same.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    same.decoder = tokenizers.decoders.ByteLevel()
    return same


def write_gpt2(folder: Path, run: TrainedRun) -> None:
    """Write the GPT-2 part, without the recurrence module, by the names of the package transformers."""
    with disk_errors(folder, ADVICE):
        folder.mkdir()
    config = run.settings.model_config
    write_tensors(folder / WEIGHTS, of_ours(run.model.state_dict(), config))
    write_settings(folder, described_gpt2(config), ADVICE)


def model_card(run: TrainedRun, has_gpt2: bool) -> str:
    """README.md: what the model is, how it was trained, what it scored, how to use it."""
    settings, step = run.settings, run.checkpoint["step"]
    size, file = sum(p.numel() for p in run.model.parameters()), settings.data.tokenizer_file
    measured = {name: value for record in read_metrics(run.path) if record["step"] == step for name, value in record.items()}
    scores = [row.format(measured[name]) for name, row in MEASURED.items() if name in measured] or ["| none at this step | |"]
    gpt2 = "\n`gpt2/` is its GPT-2 part alone, without the recurrence: `GPT2LMHeadModel.from_pretrained` loads it.\n"
    tokenizer = f"of its own, in `{file}`" if file else f"`{run.tokenizer.name}`"
    return f"""# {settings.model}: {Path(run.path).resolve().name}

{run.model.describe()}; {size:,} parameters, after step {step:,} of {settings.training.steps:,}.

Trained on `{settings.data.data}` with

    python train.py {shlex.join(options_of(settings))}

| score | |
| --- | --- |
{chr(10).join(scores)}

`{WEIGHTS}` holds the parameters by the names of `reference/{settings.model}.py`; matrices are (out, in).
`{SETTINGS}` holds all settings. The tokenizer is {tokenizer}: {counted(run.tokenizer.vocabulary, "token")}.
{gpt2 if has_gpt2 else ""}
Train on from here with `python train.py --init FOLDER --data TEXT`.
"""
