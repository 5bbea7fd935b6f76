"""A published GPT-2, a folder or its safetensors file: read and checked, as the contents of a run's checkpoint.

The file's tensors are wte.weight (V, D), wpe.weight, and for each layer i h.{i}.ln_1, h.{i}.attn.c_attn (D, 3D: query, key
and value), h.{i}.attn.c_proj, h.{i}.ln_2, h.{i}.mlp.c_fc and h.{i}.mlp.c_proj, then ln_f, each with weight and bias. The names
may have the prefix `transformer.`. The matrices are (in, out), ours (out, in). Masks (attn.bias, attn.masked_bias) are ignored.
lm_head.weight must be absent or equal to wte.weight. The number of heads is in config.json beside it, else heads are 64 wide. The
tokenizer is the folder's own (vocab.json and merges.txt, or tokenizer.json), else tiktoken's gpt2.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import torch

from accelerated.presets.pretrained_recurrence import GPT2
from accelerated.program.errors import InputError, optional_package
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
JOINED = {
    "weight": ("query", "key", "value"),
    "bias": ("query_bias", "key_bias", "value_bias"),
}  # the parts of attn.c_attn
# {field of config.json: values with which GPT-2 computes the same as our model}
COMPUTED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
SETTINGS, WEIGHTS = "config.json", "model.safetensors"  # files of a published GPT-2
DTYPES = ("F16", "BF16", "F32", "F64")
EXPECTED = "expected GPT-2 in safetensors, such as model.safetensors of openai-community/gpt2"


def open_file(path: Path) -> tuple[Path, Any]:
    """Return (file, safetensors reader) for path: a file, or a folder with model.safetensors.

    The reader has read only the header. Raises InputError if the file is not a whole safetensors file.
    """
    safetensors, file = (
        optional_package("safetensors", "a GPT-2 needs", "gpt2"),
        path / WEIGHTS if path.is_dir() else path,
    )
    try:
        return file, safetensors.safe_open(file, "pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{file} is not a whole safetensors file ({error}); {EXPECTED}") from None


def of_gpt2(named: dict) -> dict:
    """Return {GPT-2's name: value} without the prefix `transformer.`, the masks, and the output layer's copy of wte."""
    named = {name.removeprefix("transformer."): value for name, value in named.items()}
    return {
        name: value
        for name, value in named.items()
        if name != "lm_head.weight" and not BUFFERS.fullmatch(name)
    }


def gpt2_shapes(config: Config) -> dict[str, tuple]:
    """Return {GPT-2's name: shape} for a model of config's sizes."""
    d, f = config.width, config.feed_forward
    shapes = {"wte.weight": (config.vocabulary, d), "wpe.weight": (config.max_positions, d)}
    matrices = {
        "attn.c_attn": (d, 3 * d),
        "attn.c_proj": (d, d),
        "mlp.c_fc": (d, f),
        "mlp.c_proj": (f, d),
    }
    layers = [f"h.{i}." for i in range(config.layers)]
    shapes |= {
        f"{norm}.{kind}": (d,)
        for kind in JOINED
        for norm in ("ln_f", *(i + n for i in layers for n in ("ln_1", "ln_2")))
    }
    shapes |= {f"{i}{name}.weight": shape for i in layers for name, shape in matrices.items()}
    return shapes | {
        f"{i}{name}.bias": shape[1:] for i in layers for name, shape in matrices.items()
    }


def renamed(tensors: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Return {our name: tensor} of GPT-2's tensors: matrices transposed; query, key and value split."""
    ours = {name: tensors[theirs] for name, theirs in OF_MODEL.items()}
    for i in range(config.layers):
        layer = {name: tensors[f"h.{i}.{theirs}"].t() for name, theirs in OF_LAYER.items()}
        for kind, names in JOINED.items():
            layer |= zip(names, tensors[f"h.{i}.attn.c_attn.{kind}"].t().chunk(3), strict=True)
        ours |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return ours


def described_config(file: Path, shapes: dict[str, tuple]) -> Config:
    """The Config of a GPT-2 with tensors of these shapes; no shape shows its heads and what it computes: config.json does.

    Raises InputError if it is not a GPT-2, or computes something else than our model.
    """
    words, positions, inner = (
        shapes.get(name, ()) for name in ("wte.weight", "wpe.weight", "h.0.mlp.c_fc.bias")
    )
    if (len(words), len(positions), len(inner)) != (2, 2, 1):
        raise InputError(
            f"{file} is not a GPT-2: it holds {', '.join(sorted(shapes)[:3])} ...; {EXPECTED}"
        )
    try:
        described = dict(json.loads((file.parent / SETTINGS).read_text()))
    except (OSError, TypeError, ValueError, RecursionError):  # no file, or no JSON object in it
        described = {}
    for name, values in COMPUTED.items():
        if described.get(name, values[0]) not in values:
            expected = f"our model has {' or '.join(map(repr, values))}; give another GPT-2"
            raise InputError(f"{file}: its config.json has {name} {described[name]!r}, {expected}")
    sizes = {
        "vocabulary": words[0],
        "width": words[1],
        "max_positions": positions[0],
        "feed_forward": inner[0],
    }
    sizes |= {
        "layers": sum(re.fullmatch(r"h\.\d+\.ln_1\.weight", name) is not None for name in shapes)
    }
    sizes |= {
        "heads": described.get("n_head", words[1] // 64),
        "segment": min(GPT2["segment"], positions[0]),
        "vectors": 0,
    }
    try:
        return Config(**sizes, dropout=GPT2["dropout"])
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{file} is not a GPT-2 that fits our model: {error}; {EXPECTED}"
        ) from None


def load_gpt2(path: str | Path) -> dict:
    """The contents, as of a checkpoint at step 0 that has read no text, of a GPT-2 without recurrence.

    Raises InputError if it is not a GPT-2, or is stored as whole numbers.
    """
    file, reader = open_file(Path(path))
    slices = of_gpt2({name: reader.get_slice(name) for name in reader.keys()})  # noqa: SIM118  not a dict
    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    config = described_config(file, shapes)
    wanted = gpt2_shapes(config)
    for name in sorted(wanted.keys() | shapes.keys()):
        expected, actual = wanted.get(name, "absent"), shapes.get(name, "absent")
        if expected != actual:
            raise InputError(
                f"{file} is not a GPT-2: {name} should be {expected}, is {actual}; {EXPECTED}"
            )
        if (dtype := slices[name].get_dtype()) not in DTYPES:
            raise InputError(
                f"{file}: {name} is stored as {dtype}; give the weights in one of {', '.join(DTYPES)}"
            )
    tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  not a dict
    heads = [tensor for name, tensor in tensors.items() if name.endswith("lm_head.weight")]
    tensors = of_gpt2(tensors)
    if any(not torch.equal(head, tensors["wte.weight"]) for head in heads):
        raise InputError(
            f"{file}: lm_head.weight differs from wte.weight, but GPT-2 has one for both; {EXPECTED}"
        )
    own = [
        file.parent / name
        for name in ("vocab.json", "tokenizer.json")
        if (file.parent / name).is_file()
    ]
    data = {"data": "", "tokenizer": str(own[0].absolute()) if own else "gpt2"}
    return {
        "model": "pretrained_recurrence",
        "model_config": dataclasses.asdict(config),
        "training": {},
        "data": data,
        "recall": {},
        "tasks": {},
        "parameters": {
            name: tensor.float().contiguous() for name, tensor in renamed(tensors, config).items()
        },
    }
