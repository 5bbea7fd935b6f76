"""Reading a published GPT-2 from a safetensors file into a pretrained_recurrence model (the file's layout: decisions.md)."""

import json
import re
from pathlib import Path

import torch

from accelerated.errors import InputError
from accelerated.presets import GPT2_SIZES

BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # masks that old files hold beside the weights
LAYER = {
    "ln_1": "norm", "ln_2": "mlp_norm", "attn.c_proj": "output", "mlp.c_fc": "mlp_hidden", "mlp.c_proj": "mlp_output",
}  # fmt: skip
EXPECTED = "expected GPT-2 in safetensors, the file model.safetensors that openai-community/gpt2 and its larger siblings publish"


def checkpoint_file(path):
    """The safetensors file that path names: itself, or model.safetensors in a folder."""
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        missing = "neither model.safetensors nor checkpoint.pt in this folder" if path.is_dir() else "no such file"
        raise InputError(f"--init {path}: {missing}; {EXPECTED}, or a run of train.py")
    return file


def kind_of(head):
    """What a file that is no safetensors file is, by its first bytes."""
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (fetch the file itself: git lfs pull, or download it)"
    if head.lstrip().startswith(b"<"):
        return "an HTML page (the download went wrong)"
    if head.startswith((b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))):
        return "a pickle (pytorch_model.bin or the like, which could run code)"
    if head.startswith(b"\x89HDF"):
        return "an HDF5 file (TensorFlow's)"
    return "no safetensors file, or one cut off in its header"


def check_file(file):
    """Refuse a file that is none of safetensors, or shorter than its header says: eight bytes of length, the header, tensors."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        head = opened.read(512)
        opened.seek(8)
        header = int.from_bytes(head[:8], "little")
        try:
            tensors = json.loads(opened.read(header)) if 8 + header <= size else None
            end = 8 + header + max(tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__")
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"--init {file} is {kind_of(head)}, of {size} bytes; {EXPECTED}") from None
    if size != end:
        raise InputError(f"--init {file} is truncated: it has {size} bytes and its header says {end}; download it again")


def read_tensors(path):
    """{GPT-2's name without the prefix transformer.: tensor} of a checkpoint; raises InputError for what is none."""
    file = checkpoint_file(path)
    check_file(file)
    try:
        import safetensors.torch
    except ImportError:
        raise InputError("--init of a safetensors file needs the package safetensors: pip install 'palimpsest[gpt2]'") from None
    try:
        tensors = safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"--init {file} cannot be read ({error}); {EXPECTED}") from None
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    head = tensors.pop("lm_head.weight", None)
    if "wte.weight" not in tensors or "wpe.weight" not in tensors or "h.0.attn.c_attn.weight" not in tensors:
        raise InputError(f"--init {file} is not a GPT-2: it holds {', '.join(sorted(tensors)[:3])} ...; {EXPECTED}")
    if head is not None and not torch.equal(head, tensors["wte.weight"]):
        raise InputError(f"--init {file}: lm_head.weight differs from wte.weight, and GPT-2 has one for both; {EXPECTED}")
    return {name: tensor for name, tensor in tensors.items() if not BUFFERS.fullmatch(name)}


def renamed(tensors):
    """{our name: tensor}: matrices turned to (out, in), query, key and value taken apart."""
    ours = {"embedding": tensors.pop("wte.weight"), "positions": tensors.pop("wpe.weight")}
    for name, tensor in tensors.items():
        parts = re.fullmatch(r"(?:h\.(\d+)\.)?(.+)\.(weight|bias)", name)
        layer, place, kind = parts.groups() if parts else (None, name, "")
        if place == "attn.c_attn":
            for part, rows in zip(
                ("query", "key", "value"), tensor.t().chunk(3) if kind == "weight" else tensor.chunk(3), strict=True
            ):
                ours[f"layers.{layer}.{part}{'' if kind == 'weight' else '_bias'}"] = rows
        elif place in ("ln_1", "ln_2", "ln_f"):
            owner = "final_norm" if place == "ln_f" else f"layers.{layer}.{LAYER[place]}"
            ours[f"{owner}.{'scale' if kind == 'weight' else 'bias'}"] = tensor
        elif place in LAYER:
            ours[f"layers.{layer}.{LAYER[place]}{'' if kind == 'weight' else '_bias'}"] = (
                tensor.t() if kind == "weight" else tensor
            )
        else:
            ours[name] = tensor  # none of GPT-2's: the comparison with the model names it
    return ours


def size_name(layers, width):
    """'gpt2-medium (24 layers of width 1024)', or the numbers alone."""
    numbers = f"{layers} layers of width {width}"
    published = [name for name, size in GPT2_SIZES.items() if size == (layers, width)]
    return f"{published[0]} ({numbers})" if published else numbers


def check_size(path, ours, config):
    """Raise InputError where the checkpoint is a GPT-2 of another size than config."""
    layers = 1 + max(int(name.split(".")[1]) for name in ours if name.startswith("layers."))
    found = {"layers": layers, "width": ours["embedding"].shape[1]}
    if (layers, found["width"]) != (config.layers, config.width):
        published = [name for name, size in GPT2_SIZES.items() if size == (layers, found["width"])]
        do = f"give --preset {published[0]}" if published else f"give --layers {layers} --width {found['width']} and its --heads"
        raise InputError(
            f"--init {path} holds {size_name(**found)}; {size_name(config.layers, config.width)} was asked for; {do}"
        )
    for name, option in (("embedding", "vocabulary"), ("positions", "max_positions")):
        rows, asked = ours[name].shape[0], getattr(config, option)
        if rows != asked:
            do = "choose the --tokenizer that it was trained with" if option == "vocabulary" else f"give --max-positions {rows}"
            raise InputError(f"--init {path} has a {option.replace('_', ' ')} of {rows}, the model's is {asked}; {do}")


def load_gpt2(model, path):
    """Put a checkpoint's weights into a pretrained_recurrence model, whose recurrence module stays as it starts.

    Raises InputError where the file is no checkpoint, is of another architecture or size than model.config, or is not finite.
    """
    ours = renamed(read_tensors(path))
    check_size(path, ours, model.config)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("module.")}
    for name in sorted(own.keys() | ours.keys()):
        expected, found = (tuple(side[name].shape) if name in side else "absent" for side in (own, ours))
        if expected != found:
            raise InputError(f"--init {path}: {name} should be {expected}, is {found}; {EXPECTED}")
        if not torch.isfinite(ours[name]).all():
            raise InputError(f"--init {path}: {name} has values that are not finite; download it again")
    model.load_state_dict(ours, strict=False)
