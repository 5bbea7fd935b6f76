"""eval.py export: a run as a folder that other programs read, and that --init takes back.

model.safetensors has the parameters by the reference's names; matrices are (out, in). config.json
has the settings. A tokenizer of the run's own has a file of its own. modeling_palimpsest.py opens
the folder in the package transformers. config.json is written last: a folder without it is not
whole.
"""

import argparse
import shlex
from pathlib import Path

from accelerated.evaluation.score import Answer, TrainedRun
from accelerated.export.program import write_program
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import disk_errors, file_checksum, written_whole
from accelerated.training.folder import EXPORT, WEIGHTS, write_settings
from accelerated.training.settings import settings_contents

ADVICE = "give another FOLDER"
MODELING = Path(__file__).with_name("modeling_palimpsest.py")
AUTO = {  # how transformers finds that file's classes
    "model_type": "palimpsest",
    "architectures": ["Palimpsest"],
    "auto_map": {
        "AutoConfig": f"{MODELING.stem}.PalimpsestConfig",
        "AutoModelForCausalLM": f"{MODELING.stem}.Palimpsest",
    },
}
README = """\
# {what}

`accelerated.load(FOLDER)` of the project that wrote this folder opens it, as `eval.py FOLDER` and
`train.py --init FOLDER` do.

{names}

`transformers.AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` opens it too, if
the project is on PYTHONPATH: modeling_palimpsest.py stands between the two.
"""
OURS = """\
model.safetensors has the parameters by the names of reference/{model}.py; model_config in
config.json has the sizes."""
OF_A_DECODER = """\
In model.safetensors decoder.* has the parameters of the model that `base` in config.json describes,
by the names of the package transformers. module.* has those of the recurrence."""


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """Write the folder; the record has its path and files.

    Raises InputError if something stands there.
    """
    folder = Path(options.folder)
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free:
        raise InputError(f"{folder} exists and is not empty; {ADVICE}, nothing is overwritten")
    is_decoder = hasattr(run.model.config, "base")
    if options.program and is_decoder:
        raise InputError("--program is for this project's own models, this is another decoder")
    safetensors = optional_package("safetensors.torch", "an exported run needs", "gpt2")

    with disk_errors(folder, ADVICE):
        folder.mkdir(parents=True, exist_ok=True)
    parameters = {name: value.cpu() for name, value in run.model.state_dict().items()}
    size = sum(value.numel() for value in parameters.values())
    names = OF_A_DECODER if is_decoder else OURS.format(model=run.settings.model)
    with written_whole(folder / MODELING.name, ADVICE) as path:
        path.write_bytes(MODELING.read_bytes())
    with written_whole(folder / WEIGHTS, ADVICE) as path:
        path.write_bytes(safetensors.save(parameters, {"format": "pt"}))
    if options.program:
        names += write_program(run.model.cpu(), folder, safetensors, ADVICE)
    tokenizer_file = run.settings.data.tokenizer_file
    if tokenizer_file:
        run.tokenizer.save(folder / tokenizer_file)
    about = {
        "format": EXPORT,
        "step": run.checkpoint["step"],
        "tokenizer": run.tokenizer.fingerprint,
        "sha256": file_checksum(folder / WEIGHTS),  # --init checks it
    }
    what = f"{run.settings.model}, {size:,} parameters, step {about['step']:,}"
    with written_whole(folder / "README.md", ADVICE) as path:
        path.write_bytes(README.format(what=what, names=names).encode())
    write_settings(folder, AUTO | about | settings_contents(run.settings), ADVICE)

    paths = [path for path in folder.rglob("*") if path.is_file()]
    files = sorted(path.relative_to(folder).as_posix() for path in paths)
    lines = [
        f"{what}, in {folder}: {', '.join(files)}",
        f"train on from there with: python train.py --init {shlex.quote(str(folder))}",
    ]
    return {"folder": str(folder), "files": files, "parameters": size}, lines
