"""The report `export` of eval.py: a run as a folder that other programs read, and that --init takes back.

model.safetensors has the parameters by the reference's names, config.json the settings, tokenizer.tiktoken the ranks of a BPE of
the run's own or tokenizer.model a sentencepiece model, tokenizer.json the BPE for the package tokenizers if that learned it,
gpt2/ the GPT-2 part of a pretrained_recurrence model as the package transformers loads it, README.md the model card. config.json
is written last: a folder without it is not whole.
"""

import argparse
import shlex
from pathlib import Path

import torch

from accelerated.data.config import PIECES, VOCABULARY
from accelerated.data.tokenizers import BpeTokenizer, merges_of, symbols_of, tokenizers_package
from accelerated.evaluation.score import TrainedRun
from accelerated.program.errors import InputError, counted
from accelerated.program.files import disk_errors, file_checksum, written_whole
from accelerated.training.folder import EXPORT, SETTINGS, WEIGHTS, write_settings
from accelerated.training.gpt2_weights import described_gpt2, of_ours, safetensors_package
from accelerated.training.log import draw_curves, read_metrics, title_of
from accelerated.training.options import options_of
from accelerated.training.settings import GPT2_MODEL, settings_contents

ADVICE = "give another FOLDER"


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Write the folder; the record has its path and files. Raises InputError if something stands there."""
    folder = Path(options.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty; {ADVICE}, nothing is overwritten")
    safetensors_package()
    if run.settings.data.train_bpe:
        tokenizers_package()
    with disk_errors(folder, ADVICE):
        folder.mkdir(parents=True, exist_ok=True)
    parameters = run.model.state_dict()
    write_tensors(folder / WEIGHTS, parameters)
    write_tokenizer(folder, run)
    if run.settings.model == GPT2_MODEL:
        write_gpt2(folder / "gpt2", run)
    curves = write_curves(folder, run)
    with written_whole(folder / "README.md", ADVICE) as path:
        path.write_text(model_card(run, curves))
    write_settings(folder, config_of(run, file_checksum(folder / WEIGHTS)), ADVICE)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    size = sum(value.numel() for value in parameters.values())
    lines = [f"{run.settings.model}, {size:,} parameters, step {run.checkpoint['step']:,}, in {folder}: {', '.join(files)}"]
    lines.append(f"train on from there with: python train.py --init {shlex.quote(str(folder))}")
    return {"folder": str(folder), "files": files, "parameters": size}, lines


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write {name: tensor} as safetensors."""
    from safetensors.torch import save_file

    with written_whole(path, ADVICE) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})


def config_of(run: TrainedRun, checksum: str) -> dict:
    """config.json: all settings, and what --init checks."""
    about = {"format": EXPORT, "step": run.checkpoint["step"], "tokenizer": run.tokenizer.fingerprint, "sha256": checksum}
    return about | settings_contents(run.settings)


def write_tokenizer(folder: Path, run: TrainedRun) -> None:
    """Write a tokenizer of the run's own, and what the package tokenizers reads if that package learned it."""
    if not run.settings.data.tokenizer_file:
        return
    run.tokenizer.save(folder)
    if run.settings.data.train_bpe:
        with written_whole(folder / "tokenizer.json", ADVICE) as path:
            tokenizer_json(run.tokenizer).save(str(path))


def tokenizer_json(tokenizer: BpeTokenizer) -> object:
    """The same BPE as a Tokenizer of the package tokenizers."""
    tokenizers = tokenizers_package()
    shown = symbols_of(tokenizer.spellings)
    merges = [(shown[left], shown[right]) for left, right in merges_of(tokenizer.spellings)]
    vocabulary = {shown[token]: rank for rank, token in enumerate(tokenizer.spellings)}
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


def write_curves(folder: Path, run: TrainedRun) -> bool:
    """Draw the run's curves if it has a log and matplotlib is installed; returns whether they were drawn."""
    records = [record for record in read_metrics(run.path) if record["step"] <= run.checkpoint["step"]]
    if not any("loss" in record for record in records):
        return False
    try:
        draw_curves(records, folder / "curves.png", title_of(run.settings))
    except InputError:
        return False
    return True


def scores_of(run: TrainedRun) -> list[str]:
    """Rows of the model card's table: the validations of this step."""
    records = [record for record in read_metrics(run.path) if record["step"] == run.checkpoint["step"]]
    rows = {}
    for record in (record for record in records if "validation_bits_per_byte" in record):
        rows["validation, bits per byte"] = f"{record['validation_bits_per_byte']:.4f}"
        rows["validation, nats per token"] = f"{record['validation_loss']:.4f}"
        if "cleared_bits_per_byte" in record:
            rows["the same, memory cleared at each segment"] = f"{record['cleared_bits_per_byte']:.4f} bits per byte"
        if "validation_tokens" in record:
            rows["tokens that were validated"] = f"{record['validation_tokens']:,}"
    return [f"| {name} | {value} |" for name, value in rows.items()]


def model_card(run: TrainedRun, curves: bool) -> str:
    """README.md: what the model is, how it was trained, what it scored, how to use it."""
    settings, step = run.settings, run.checkpoint["step"]
    size, own = sum(p.numel() for p in run.model.parameters()), settings.data.tokenizer_file
    kind = {PIECES: "a sentencepiece model", VOCABULARY: "a closed vocabulary of words"}.get(own, "a byte-level BPE")
    tokens = counted(run.tokenizer.vocabulary, "token")
    tokenizer = f"{kind} of its own, {tokens}, in `{own}`" if own else f"`{run.tokenizer.name}`, {tokens}"
    scores = scores_of(run) or ["| none at this step | |"]
    gpt2 = "\n`gpt2/` is its GPT-2 part alone, without the recurrence: `GPT2LMHeadModel.from_pretrained` loads it.\n"
    return f"""# {settings.model}: {Path(run.path).resolve().name}

{run.model.describe()}; {size:,} parameters, after step {step:,} of {settings.training.steps:,}.

Trained on `{settings.data.data}` with

    python train.py {shlex.join(options_of(settings))}

| score | |
| --- | --- |
{chr(10).join(scores)}
{chr(10) + "![loss, learning rate and gradient norm by step](curves.png)" + chr(10) if curves else ""}
`{WEIGHTS}` holds the parameters by the names of `reference/{settings.model}.py`; matrices are (out, in).
`{SETTINGS}` holds all settings. The tokenizer is {tokenizer}.
{gpt2 if settings.model == GPT2_MODEL else ""}
Train on from here with `python train.py --init FOLDER --data TEXT`.
"""
