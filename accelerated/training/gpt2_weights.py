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

from accelerated.errors import InputError, option_name
from accelerated.training.settings import GPT2_SIZES

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


def read_header(path):
    """(file, {tensor: shape}) of the safetensors file that path names: eight bytes of its header's length, the header, tensors.

    Raises InputError for what is no such file, and for one that is not as long as its header says.
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
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = 8 + header + max(entry["data_offsets"][1] for entry in entries.values())
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (ValueError, TypeError, LookupError, AttributeError):
        raise InputError(f"--init {file} is {kind_of(head)}, of {size} bytes; {EXPECTED}") from None
    if size != end:
        what = "truncated" if size < end else "longer than it should be"
        raise InputError(f"--init {file} is {what}: it has {size} bytes and its header says {end}; download it again")
    return file, shapes


def of_gpt2(named):
    """{GPT-2's name: value} of what a file holds: without the prefix transformer., the masks and the output's copy of wte."""
    named = {name.removeprefix("transformer."): value for name, value in named.items()}
    return {name: value for name, value in named.items() if name != "lm_head.weight" and not BUFFERS.fullmatch(name)}


def check_gpt2(path, config):
    """The file that path names, if its header says that it is a GPT-2 of config's sizes; raises InputError otherwise.

    Of the tensors nothing is read.
    """
    file, shapes = read_header(path)
    shapes = of_gpt2(shapes)
    if "wte.weight" not in shapes or not any(name.startswith("h.0.") for name in shapes):
        raise InputError(f"--init {file} is not a GPT-2: it holds {', '.join(sorted(shapes)[:3])} ...; {EXPECTED}")
    check_size(path, shapes, config)
    check_heads(file, config)
    wanted = gpt2_shapes(config)
    for name in sorted(wanted.keys() | shapes.keys()):
        expected, found = wanted.get(name, "absent"), shapes.get(name, "absent")
        if expected != found:
            raise InputError(f"--init {path} is not a GPT-2: {name} should be {expected}, is {found}; {EXPECTED}")
    return file


def read_tensors(file):
    """{GPT-2's name: tensor} of a safetensors file; raises InputError where its output is not its embedding."""
    try:
        import safetensors.torch
    except ImportError:
        raise InputError("--init of a safetensors file needs the package safetensors: pip install safetensors") from None
    try:
        tensors = safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError, KeyError) as error:
        raise InputError(f"--init {file} cannot be read ({error}); {EXPECTED}") from None
    heads = [tensor for name, tensor in tensors.items() if name.endswith("lm_head.weight")]
    tensors = of_gpt2(tensors)
    if any(not torch.equal(head, tensors["wte.weight"]) for head in heads):
        raise InputError(f"--init {file}: lm_head.weight differs from wte.weight, and GPT-2 has one for both; {EXPECTED}")
    return tensors


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


def published_size(layers, width):
    """The name of the published GPT-2 of so many layers of that width, None if there is none."""
    return next((name for name, size in GPT2_SIZES.items() if size == (layers, width)), None)


def size_name(sizes):
    """'gpt2-medium (24 layers of width 1024)' of published sizes, or the numbers alone."""
    layers, width, positions, inner = sizes.values()
    usual = published_size(layers, width) if (positions, inner) == (1024, 4 * width) else None
    if usual:
        return f"{usual} ({layers} layers of width {width})"
    return f"{layers} layers of width {width}, feed-forward {inner}, {positions} positions"


def check_size(path, shapes, config):
    """Raise InputError where a GPT-2 of these shapes is of another size than config; it says all that should be given."""
    layers = sum(re.fullmatch(r"h\.\d+\.ln_1\.weight", name) is not None for name in shapes)
    table, inner = shapes.get("wpe.weight", ()), shapes.get("h.0.mlp.c_fc.bias", ())
    if len(shapes["wte.weight"]) != 2 or len(table) != 2 or len(inner) != 1:
        raise InputError(
            f"--init {path} is not a GPT-2: wte.weight and wpe.weight are {shapes['wte.weight']}, {table}; {EXPECTED}"
        )
    vocabulary, width = shapes["wte.weight"]
    if vocabulary != config.vocabulary:
        raise InputError(
            f"--init {path} has a vocabulary of {vocabulary}, the model's is {config.vocabulary}; "
            "choose the --tokenizer that it was trained with"
        )
    found = {"layers": layers, "width": width, "max_positions": table[0], "feed_forward": inner[0]}
    other = {name: size for name, size in found.items() if size != getattr(config, name)}
    if not other:
        return
    do = " ".join(f"{option_name(name)} {size}" for name, size in other.items())
    do += " and its --heads" if "width" in other else ""
    if "layers" in other and (published := published_size(layers, width)):
        do = f"--preset {published}"
    asked = {name: getattr(config, name) for name in other}
    raise InputError(f"--init {path} holds {size_name(found)}; {size_name(found | asked)} was asked for; give {do}")


def check_heads(file, config):
    """Raise InputError where the number of heads, which no shape shows, is not that of config.json or of the published GPT-2."""
    described = file.parent / "config.json"
    try:
        heads = json.loads(described.read_text()).get("n_head") if described.is_file() else None
    except (OSError, ValueError, AttributeError):
        heads = None
    if heads is None and published_size(config.layers, config.width):
        heads = config.width // 64
    if heads not in (None, config.heads):
        raise InputError(f"--init {file} has {heads} heads, the model's heads are {config.heads}; give --heads {heads}")


def load_gpt2(model, path):
    """Put a checkpoint's weights into a pretrained_recurrence model, whose recurrence module stays as it starts.

    Raises InputError where the file is no checkpoint, is of another architecture or size than model.config, or is not finite.
    """
    tensors = read_tensors(check_gpt2(path, model.config))
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"--init {path}: {name} has values that are not finite; download it again")
    model.load_state_dict(renamed(tensors, model.config), strict=False)
