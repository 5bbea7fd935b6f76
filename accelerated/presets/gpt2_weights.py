"""A published GPT-2, a safetensors file: checked and loaded into a pretrained_recurrence model for --init.

The file's tensors are wte.weight (V, D), wpe.weight, and for each layer i h.{i}.ln_1, h.{i}.attn.c_attn (D, 3D: query, key
and value), h.{i}.attn.c_proj, h.{i}.ln_2, h.{i}.mlp.c_fc and h.{i}.mlp.c_proj, then ln_f, each with weight and bias. The names
may have the prefix `transformer.`. The matrices are (in, out), ours (out, in). Masks (attn.bias, attn.masked_bias) are ignored.
lm_head.weight must be absent or equal to wte.weight.
"""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from accelerated.presets.pretrained_recurrence import GPT2_SIZES
from accelerated.program.errors import InputError, option_name, optional_package
from reference.pretrained_recurrence import Config

BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
# {our name: GPT-2's}, of the model and of each layer; matrices of a layer are transposed
OF_MODEL = {
    "embedding": "wte.weight",
    "positions": "wpe.weight",
    "final_norm.scale": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
}
OF_LAYER = {
    "norm.scale": "ln_1.weight",
    "norm.bias": "ln_1.bias",
    "output": "attn.c_proj.weight",
    "output_bias": "attn.c_proj.bias",
    "mlp_norm.scale": "ln_2.weight",
    "mlp_norm.bias": "ln_2.bias",
    "mlp_hidden": "mlp.c_fc.weight",
    "mlp_hidden_bias": "mlp.c_fc.bias",
    "mlp_output": "mlp.c_proj.weight",
    "mlp_output_bias": "mlp.c_proj.bias",
}
JOINED = {"weight": ("query", "key", "value"), "bias": ("query_bias", "key_bias", "value_bias")}  # the parts of attn.c_attn
# {field of config.json: values with which GPT-2 computes the same as our model}
COMPUTED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
PUBLISHED = {size: name for name, size in GPT2_SIZES.items()}
SETTINGS, WEIGHTS = "config.json", "model.safetensors"  # files of a published GPT-2
DTYPES = ("F16", "BF16", "F32", "F64")
EXPECTED = "expected GPT-2 in safetensors, such as model.safetensors of openai-community/gpt2"


def safetensors_package(what: str = "an exported run") -> ModuleType:
    """The package safetensors; raises InputError if it is not installed."""
    return optional_package("safetensors", f"{what} needs", "gpt2")


def open_file(path: str | Path) -> tuple[Path, Any]:
    """Return (file, safetensors reader) for path: a file, or a folder with model.safetensors.

    The reader has read only the header. Raises InputError if the file is not a whole safetensors file.
    """
    safetensors, path = safetensors_package("--init of a safetensors file"), Path(path)
    file = path / WEIGHTS if path.is_dir() else path
    if not file.is_file():
        missing = f"neither {WEIGHTS} nor checkpoint.pt in this folder" if path.is_dir() else "no such file"
        raise InputError(f"--init {path}: {missing}; {EXPECTED}, or a run of train.py")
    try:
        return file, safetensors.safe_open(file, "pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"--init {file} is not a whole safetensors file ({error}); {EXPECTED}") from None


def of_gpt2(named: dict) -> dict:
    """Return {GPT-2's name: value} without the prefix `transformer.`, the masks, and the output layer's copy of wte."""
    named = {name.removeprefix("transformer."): value for name, value in named.items()}
    return {name: value for name, value in named.items() if name != "lm_head.weight" and not BUFFERS.fullmatch(name)}


def check_gpt2(path: str | Path, config: Config) -> Path:
    """Return the file that path names; raises InputError if its header does not describe a GPT-2 of config's sizes.

    Reads no tensors.
    """
    file, reader = open_file(path)
    slices = of_gpt2({name: reader.get_slice(name) for name in reader.keys()})  # noqa: SIM118  not a dict
    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    if "wte.weight" not in shapes or not any(name.startswith("h.0.") for name in shapes):
        raise InputError(f"--init {file} is not a GPT-2: it holds {', '.join(sorted(shapes)[:3])} ...; {EXPECTED}")
    check_described(file, shapes, config)
    wanted = gpt2_shapes(config)
    for name in sorted(wanted.keys() | shapes.keys()):
        expected, actual = wanted.get(name, "absent"), shapes.get(name, "absent")
        if expected != actual:
            raise InputError(f"--init {path} is not a GPT-2: {name} should be {expected}, is {actual}; {EXPECTED}")
    for name, part in slices.items():
        if (dtype := part.get_dtype()) not in DTYPES:
            raise InputError(f"--init {path}: {name} is stored as {dtype}; give the weights in one of {', '.join(DTYPES)}")
    return file


def gpt2_shapes(config: Config) -> dict[str, tuple]:
    """Return {GPT-2's name: shape} for a model of config's sizes."""
    d, f = config.width, config.feed_forward
    shapes = {"wte.weight": (config.vocabulary, d), "wpe.weight": (config.max_positions, d)}
    matrices = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, f), "mlp.c_proj": (f, d)}
    layers = [f"h.{i}." for i in range(config.layers)]
    shapes |= {f"{norm}.{kind}": (d,) for kind in JOINED for norm in ("ln_f", *(i + n for i in layers for n in ("ln_1", "ln_2")))}
    shapes |= {f"{i}{name}.weight": shape for i in layers for name, shape in matrices.items()}
    return shapes | {f"{i}{name}.bias": shape[1:] for i in layers for name, shape in matrices.items()}


def renamed(tensors: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Return {our name: tensor} of GPT-2's tensors: matrices transposed; query, key and value split."""
    ours = {name: tensors[theirs] for name, theirs in OF_MODEL.items()}
    for i in range(config.layers):
        layer = {name: tensors[f"h.{i}.{theirs}"].t() for name, theirs in OF_LAYER.items()}
        for kind, names in JOINED.items():
            layer |= zip(names, tensors[f"h.{i}.attn.c_attn.{kind}"].t().chunk(3), strict=True)
        ours |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return ours


def check_described(file: Path, shapes: dict[str, tuple], config: Config) -> None:
    """Raise InputError if a GPT-2 differs in size from config, which lists the options to give, or computes something else.

    No shape shows the number of heads and what is computed: config.json beside the file does. Without it a GPT-2 of a published
    size has that size's heads.
    """
    try:
        described = dict(json.loads((file.parent / SETTINGS).read_text()))
    except (OSError, TypeError, ValueError, RecursionError):  # no file, or no JSON object in it
        described = {}
    words, positions, inner = (shapes.get(name, ()) for name in ("wte.weight", "wpe.weight", "h.0.mlp.c_fc.bias"))
    if len(words) != 2 or len(positions) != 2 or len(inner) != 1:
        raise InputError(f"--init {file} is not a GPT-2: wte.weight and wpe.weight are {words}, {positions}; {EXPECTED}")
    layers = sum(re.fullmatch(r"h\.\d+\.ln_1\.weight", name) is not None for name in shapes)
    preset = PUBLISHED.get((layers, words[1]))
    heads = described.get("n_head", words[1] // 64 if preset else config.heads)
    sizes = {"vocabulary": words[0], "layers": layers, "width": words[1], "heads": heads}
    sizes |= {"max_positions": positions[0], "feed_forward": inner[0]}
    other = {name: size for name, size in sizes.items() if size != getattr(config, name)}
    if other:
        theirs, ours = (", ".join(f"{name} {of[name]}" for name in other) for of in (sizes, vars(config)))
        do = " ".join(f"{option_name(name)} {size}" for name, size in other.items())
        do = "the --tokenizer that it was trained with" if "vocabulary" in other else f"--preset {preset}" if preset else do
        raise InputError(f"--init {file} has {theirs}, the model has {ours}; give {do}")
    for name, values in COMPUTED.items():
        if described.get(name, values[0]) not in values:
            raise InputError(
                f"--init {file}: its config.json has {name} {described[name]!r}, our model has "
                f"{' or '.join(map(repr, values))}; give another GPT-2"
            )


def load_gpt2(model: torch.nn.Module, path: str | Path) -> None:
    """Load a GPT-2's weights into a pretrained_recurrence model; its recurrence module keeps its initial weights.

    Raises InputError if the file is not a GPT-2, differs from model.config, or holds NaN or infinite values.
    """
    _, reader = open_file(check_gpt2(path, model.config))
    tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  not a dict
    heads = [tensor for name, tensor in tensors.items() if name.endswith("lm_head.weight")]
    tensors = of_gpt2(tensors)
    if any(not torch.equal(head, tensors["wte.weight"]) for head in heads):
        raise InputError(f"--init {path}: lm_head.weight differs from wte.weight, but GPT-2 has one for both; {EXPECTED}")
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"--init {path}: {name} has NaN or infinite values; download it again")
    model.load_state_dict(renamed(tensors, model.config), strict=False)
