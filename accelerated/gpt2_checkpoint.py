"""Reading a published GPT-2 from a safetensors file into a pretrained_recurrence model.

The file names its tensors wte.weight (V, D), wpe.weight, and for each layer i h.{i}.ln_1, h.{i}.attn.c_attn (D, 3D: query, key
and value), h.{i}.attn.c_proj, h.{i}.ln_2, h.{i}.mlp.c_fc and h.{i}.mlp.c_proj, then ln_f, each with weight and bias; a prefix
`transformer.` may stand before them. Matrices are (in, out), ours (out, in). Masks (attn.bias, attn.masked_bias) are left out,
and lm_head.weight is absent or equal to wte.weight.
"""

import json
import re
from pathlib import Path

import torch

from accelerated.errors import InputError
from accelerated.presets import GPT2_SIZES

BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
NORMS = {"ln_1": "norm", "ln_2": "mlp_norm"}
MATRICES = {"attn.c_proj": "output", "mlp.c_fc": "mlp_hidden", "mlp.c_proj": "mlp_output"}
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


def check_file(path):
    """The safetensors file that path names; refuses what is none, and what is not as long as its header says.

    Such a file is eight bytes of the header's length, the header, and the tensors.
    """
    file = checkpoint_file(path)
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            head = opened.read(512)
            opened.seek(8)
            header = int.from_bytes(head[:8], "little")
            text = opened.read(header) if 8 + header <= size else b""
    except OSError as error:
        raise InputError(f"--init {file} cannot be read: {error.strerror}; {EXPECTED}") from None
    try:
        end = 8 + header + max(entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__")
    except (ValueError, TypeError, LookupError, AttributeError):
        raise InputError(f"--init {file} is {kind_of(head)}, of {size} bytes; {EXPECTED}") from None
    if size != end:
        what = "truncated" if size < end else "longer than it should be"
        raise InputError(f"--init {file} is {what}: it has {size} bytes and its header says {end}; download it again")
    return file


def read_tensors(path):
    """{GPT-2's name without the prefix transformer.: tensor} of a checkpoint; raises InputError for what is none."""
    file = check_file(path)
    try:
        import safetensors.torch
    except ImportError:
        raise InputError("--init of a safetensors file needs the package safetensors: pip install 'palimpsest[gpt2]'") from None
    try:
        tensors = safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError, KeyError) as error:
        raise InputError(f"--init {file} cannot be read ({error}); {EXPECTED}") from None
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    head = tensors.pop("lm_head.weight", None)
    if not {"wte.weight", "wpe.weight", "h.0.attn.c_attn.weight"} <= tensors.keys():
        raise InputError(f"--init {file} is not a GPT-2: it holds {', '.join(sorted(tensors)[:3])} ...; {EXPECTED}")
    if head is not None and not torch.equal(head, tensors["wte.weight"]):
        raise InputError(f"--init {file}: lm_head.weight differs from wte.weight, and GPT-2 has one for both; {EXPECTED}")
    return {name: tensor for name, tensor in tensors.items() if not BUFFERS.fullmatch(name)}


def gpt2_shapes(config):
    """{GPT-2's name: shape} of a model of config's sizes."""
    d, f = config.width, config.feed_forward
    shapes = {"wte.weight": (config.vocabulary, d), "wpe.weight": (config.max_positions, d)}
    matrices = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, f), "mlp.c_proj": (f, d)}
    norms = ["ln_f", *(f"h.{i}.{name}" for i in range(config.layers) for name in NORMS)]
    shapes |= {f"{norm}.{kind}": (d,) for norm in norms for kind in ("weight", "bias")}
    for i in range(config.layers):
        shapes |= {f"h.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"h.{i}.{name}.bias": shape[1:] for name, shape in matrices.items()}
    return shapes


def renamed(tensors, config):
    """{our name: tensor} of tensors that have gpt2_shapes: matrices turned, query, key and value taken apart."""
    ours = {"embedding": tensors["wte.weight"], "positions": tensors["wpe.weight"]}
    ours |= {"final_norm.scale": tensors["ln_f.weight"], "final_norm.bias": tensors["ln_f.bias"]}
    for i in range(config.layers):
        for name, own in NORMS.items():
            ours[f"layers.{i}.{own}.scale"] = tensors[f"h.{i}.{name}.weight"]
            ours[f"layers.{i}.{own}.bias"] = tensors[f"h.{i}.{name}.bias"]
        for name, own in MATRICES.items():
            ours[f"layers.{i}.{own}"] = tensors[f"h.{i}.{name}.weight"].t()
            ours[f"layers.{i}.{own}_bias"] = tensors[f"h.{i}.{name}.bias"]
        weights, biases = (tensors[f"h.{i}.attn.c_attn.{kind}"].t().chunk(3) for kind in ("weight", "bias"))
        for own, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            ours |= {f"layers.{i}.{own}": weight, f"layers.{i}.{own}_bias": bias}
    return ours


def size_name(layers, width):
    """'gpt2-medium (24 layers of width 1024)', or the numbers alone."""
    numbers = f"{layers} layers of width {width}"
    published = [name for name, size in GPT2_SIZES.items() if size == (layers, width)]
    return f"{published[0]} ({numbers})" if published else numbers


def check_size(path, tensors, config):
    """Raise InputError where the checkpoint is a GPT-2 of another size than config, which says what to give."""
    layers = sum(re.fullmatch(r"h\.\d+\.attn\.c_attn\.weight", name) is not None for name in tensors)
    sizes = {name: tuple(tensors[name].shape) for name in ("wte.weight", "wpe.weight", "h.0.attn.c_attn.weight")}
    if any(len(shape) != 2 for shape in sizes.values()):
        raise InputError(
            f"--init {path} is not a GPT-2: its matrices have shapes {', '.join(map(str, sizes.values()))}; {EXPECTED}"
        )
    (vocabulary, width), (positions, _) = sizes["wte.weight"], sizes["wpe.weight"]
    if (layers, width) != (config.layers, config.width):
        published = [name for name, size in GPT2_SIZES.items() if size == (layers, width)]
        do = f"give --preset {published[0]}" if published else f"give --layers {layers} --width {width} and its --heads"
        raise InputError(
            f"--init {path} holds {size_name(layers, width)}; {size_name(config.layers, config.width)} was asked for; {do}"
        )
    inner = tensors.get("h.0.mlp.c_fc.bias", torch.zeros(config.feed_forward)).shape[0]
    for option, found in (("vocabulary", vocabulary), ("max_positions", positions), ("feed_forward", inner)):
        if found != getattr(config, option):
            name = option.replace("_", "-")
            do = "choose the --tokenizer that it was trained with" if option == "vocabulary" else f"give --{name} {found}"
            raise InputError(f"--init {path} has a {option} of {found}, the model's is {getattr(config, option)}; {do}")


def check_heads(file, config):
    """Raise InputError where the number of heads, which no shape shows, is not that of config.json or of the published GPT-2."""
    described = file.parent / "config.json"
    try:
        heads = json.loads(described.read_text()).get("n_head") if described.is_file() else None
    except (OSError, ValueError, AttributeError):
        heads = None
    if heads is None and (config.layers, config.width) in GPT2_SIZES.values():
        heads = config.width // 64
    if heads not in (None, config.heads):
        raise InputError(f"--init {file} has {heads} heads, the model's heads are {config.heads}; give --heads {heads}")


def load_gpt2(model, path):
    """Put a checkpoint's weights into a pretrained_recurrence model, whose recurrence module stays as it starts.

    Raises InputError where the file is no checkpoint, is of another architecture or size than model.config, or is not finite.
    """
    tensors = read_tensors(path)
    check_size(path, tensors, model.config)
    check_heads(checkpoint_file(path), model.config)
    shapes = gpt2_shapes(model.config)
    for name in sorted(shapes.keys() | tensors.keys()):
        expected, found = shapes.get(name, "absent"), tuple(tensors[name].shape) if name in tensors else "absent"
        if expected != found:
            raise InputError(f"--init {path} is not a GPT-2: {name} should be {expected}, is {found}; {EXPECTED}")
        if not torch.isfinite(tensors[name]).all():
            raise InputError(f"--init {path}: {name} has values that are not finite; download it again")
    model.load_state_dict(renamed(tensors, model.config), strict=False)
