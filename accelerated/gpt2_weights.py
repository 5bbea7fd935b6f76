"""A published GPT-2, a folder or its safetensors file, as the contents of a run's checkpoint.

Its tensors are wte.weight (V, D), wpe.weight, and for each layer i h.{i}.ln_1, h.{i}.attn.c_attn
(D, 3D: query, key and value), h.{i}.attn.c_proj, h.{i}.ln_2, h.{i}.mlp.c_fc and h.{i}.mlp.c_proj,
then ln_f, each with weight and bias. The names may have the prefix `transformer.`. The matrices are
(in, out), ours (out, in). Masks (attn.bias, attn.masked_bias) are ignored. lm_head.weight must be
absent or equal to wte.weight. The number of heads is in config.json beside it, else heads are 64
wide. The tokenizer is the folder's own (vocab.json and merges.txt, or tokenizer.json), else
tiktoken's gpt2.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import torch

from accelerated.presets.pretrained_recurrence import GPT2
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import regular
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
# The parts of attn.c_attn
JOINED = {
    "weight": ("query", "key", "value"),
    "bias": ("query_bias", "key_bias", "value_bias"),
}
# {field of config.json: values with which GPT-2 computes the same as our model}
COMPUTED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
SETTINGS = "config.json"  # files of a published GPT-2
WEIGHTS = "model.safetensors"
DTYPES = ("F16", "BF16", "F32", "F64")
EXPECTED = (
    "expected GPT-2 in safetensors, such as model.safetensors of openai-community/gpt2, "
    "or another decoder's folder with its config.json"
)


def load_gpt2(path: str | Path) -> dict:
    """The contents, as of a checkpoint at step 0 that has read no text, of a plain GPT-2.

    Raises InputError if it is not a GPT-2, or is stored as whole numbers.
    """
    file, reader = open_file(Path(path))
    names = list(reader.keys())
    slices = of_gpt2({name: reader.get_slice(name) for name in names})
    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    config = described_config(file, shapes)
    check_shapes(file, shapes, gpt2_shapes(config))
    check_types(file, slices)

    tensors = {name: reader.get_tensor(name) for name in names}
    check_output(file, tensors)
    parameters = {}
    for name, tensor in renamed(of_gpt2(tensors), config.layers).items():
        parameters[name] = tensor.float().contiguous()
    return contents_of(config, tokenizer_beside(file), parameters)


def contents_of(config: Config, tokenizer: str, parameters: dict[str, torch.Tensor]) -> dict:
    """The contents, as of a checkpoint at step 0 that has read no text, of a published model."""
    return {
        "model": "pretrained_recurrence",
        "model_config": dataclasses.asdict(config),
        "training": {},
        "data": {"data": "", "tokenizer": tokenizer},
        "recall": {},
        "tasks": {},
        "parameters": parameters,
    }


def open_file(path: Path) -> tuple[Path, Any]:
    """The file and its safetensors reader, for a file or a folder with model.safetensors.

    The reader has read only the header. Raises InputError if it is not a whole safetensors file.
    """
    safetensors = optional_package("safetensors", "a GPT-2 needs", "gpt2")
    file = path / WEIGHTS if path.is_dir() else path
    try:
        return file, safetensors.safe_open(regular(file), "pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{file} is not a whole safetensors file ({error}); {EXPECTED}") from None


def of_gpt2(named: dict[str, Any]) -> dict[str, Any]:
    """What is named as in GPT-2 without its prefix, without masks and the output layer's copy."""
    kept = {}
    for name, value in named.items():
        name = name.removeprefix("transformer.")
        if name != "lm_head.weight" and not BUFFERS.fullmatch(name):
            kept[name] = value
    return kept


# Which model it is


def described_config(file: Path, shapes: dict[str, tuple]) -> Config:
    """The Config of a GPT-2 with tensors of these shapes.

    No shape shows its heads and what it computes: config.json does. Raises InputError if it is not
    a GPT-2, or computes something else than our model.
    """
    words = shapes.get("wte.weight", ())
    positions = shapes.get("wpe.weight", ())
    inner = shapes.get("h.0.mlp.c_fc.bias", ())
    if (len(words), len(positions), len(inner)) != (2, 2, 1):
        held = ", ".join(sorted(shapes)[:3])
        raise InputError(f"{file} is not a GPT-2: it holds {held} ...; {EXPECTED}")
    described = settings_beside(file)
    layers = [name for name in shapes if re.fullmatch(r"h\.\d+\.ln_1\.weight", name)]
    try:
        return Config(
            vocabulary=words[0],
            width=words[1],
            max_positions=positions[0],
            feed_forward=inner[0],
            layers=len(layers),
            heads=described.get("n_head", words[1] // 64),
            segment=min(GPT2["segment"], positions[0]),
            vectors=0,
            dropout=GPT2["dropout"],
        )
    except (TypeError, ValueError) as error:
        wrong = f"{file} is not a GPT-2 that fits our model: {error}"
        raise InputError(f"{wrong}; {EXPECTED}") from None


def settings_beside(file: Path) -> dict[str, Any]:
    """The contents of config.json; empty if there is none, or no JSON object in it.

    Raises InputError if they say that it computes something else than our model.
    """
    try:
        described = dict(json.loads(regular(file.parent / SETTINGS).read_text()))
    except (OSError, TypeError, ValueError, RecursionError):
        return {}
    for name, values in COMPUTED.items():
        if described.get(name, values[0]) not in values:
            ours = " or ".join(repr(value) for value in values)
            wrong = f"its config.json has {name} {described[name]!r}, our model has {ours}"
            raise InputError(f"{file}: {wrong}; give another GPT-2")
    return described


def tokenizer_beside(file: Path) -> str:
    """The tokenizer's file beside a GPT-2, or else the name of tiktoken's."""
    for name in ("tokenizer.json", "vocab.json"):
        own = file.parent / name
        if own.is_file():
            return str(own.absolute())
    return "gpt2"


# Its tensors


def gpt2_shapes(config: Config) -> dict[str, tuple]:
    """{GPT-2's name: shape} for a model of config's sizes: those of ours, as it is published."""
    with torch.device("meta"):
        model = PretrainedRecurrence(config)
    published = as_published(model.state_dict(), config.layers)
    return {name: tuple(tensor.shape) for name, tensor in of_gpt2(published).items()}


def check_shapes(file: Path, shapes: dict[str, tuple], wanted: dict[str, tuple]) -> None:
    """Raise InputError unless exactly the wanted tensors are there, with their shapes."""
    for name in sorted(wanted.keys() | shapes.keys()):
        expected = wanted.get(name, "absent")
        actual = shapes.get(name, "absent")
        if expected != actual:
            wrong = f"{file} is not a GPT-2: {name} should be {expected}, is {actual}"
            raise InputError(f"{wrong}; {EXPECTED}")


def check_types(file: Path, slices: dict[str, Any]) -> None:
    """Raise InputError if weights are stored as whole numbers."""
    for name in sorted(slices):
        dtype = slices[name].get_dtype()
        if dtype not in DTYPES:
            wrong = f"{file}: {name} is stored as {dtype}"
            raise InputError(f"{wrong}; give the weights in one of {', '.join(DTYPES)}")


def check_output(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raise InputError unless the output layer, if it is stored, is the embedding."""
    embedding = of_gpt2(tensors)["wte.weight"]
    for name, tensor in tensors.items():
        if name.endswith("lm_head.weight") and not torch.equal(tensor, embedding):
            wrong = f"{file}: lm_head.weight differs from wte.weight, but GPT-2 has one for both"
            raise InputError(f"{wrong}; {EXPECTED}")


def renamed(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """{our name: tensor} of GPT-2's: matrices are transposed, query, key and value split."""
    ours = {name: tensors[theirs] for name, theirs in OF_MODEL.items()}
    for layer in range(layers):
        for name, theirs in OF_LAYER.items():
            ours[f"layers.{layer}.{name}"] = tensors[f"h.{layer}.{theirs}"].t()
        for kind, names in JOINED.items():
            parts = tensors[f"h.{layer}.attn.c_attn.{kind}"].t().chunk(3)
            for name, part in zip(names, parts, strict=True):
                ours[f"layers.{layer}.{name}"] = part
    return ours


# Written, for eval.py export


def as_published(parameters: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """{GPT-2's name: tensor} of ours, as `renamed` reads them and the package transformers does."""
    theirs = {name: parameters[ours] for ours, name in OF_MODEL.items()}
    for layer in range(layers):
        for ours, name in OF_LAYER.items():
            theirs[f"h.{layer}.{name}"] = parameters[f"layers.{layer}.{ours}"].t()
        for kind, names in JOINED.items():
            parts = [parameters[f"layers.{layer}.{name}"].t() for name in names]
            theirs[f"h.{layer}.attn.c_attn.{kind}"] = torch.cat(parts, -1)
    return {f"transformer.{name}": tensor.contiguous() for name, tensor in theirs.items()}


def published_config(config: Config) -> dict[str, Any]:
    """What the config.json of a published GPT-2 of these sizes says."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocabulary,
        "n_positions": config.max_positions,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.feed_forward,
        "bos_token_id": None,  # ours has no such token
        "eos_token_id": None,
    } | {name: values[0] for name, values in COMPUTED.items()}
