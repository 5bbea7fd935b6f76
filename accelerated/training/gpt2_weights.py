"""A published GPT-2, a safetensors file: checked and loaded into a pretrained_recurrence model for --init, and the way back.

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
from accelerated.training.folder import SETTINGS, WEIGHTS
from reference.pretrained_recurrence import Config

BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
NORMS = {"ln_1": "norm", "ln_2": "mlp_norm"}
MATRICES = {"attn.c_proj": "output", "mlp.c_fc": "mlp_hidden", "mlp.c_proj": "mlp_output"}
# {field of config.json: values with which GPT-2 computes the same as our model}
COMPUTED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
}  # fmt: skip
PUBLISHED = {size: name for name, size in GPT2_SIZES.items()}
DTYPES = ("F16", "BF16", "F32", "F64")
LOOK_ALIKES = {  # {first bytes of a file: what it is instead}
    b"version https://git-lfs": "it is a Git LFS pointer: git lfs pull fetches the file", b"<": "it is an HTML page",
    b"PK\x03\x04": "it is a pickle, which could run code", b"\x80": "it is a pickle, which could run code",
    b"\x89HDF": "it is an HDF5 file, TensorFlow's",
}  # fmt: skip
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
    except OSError as error:
        raise InputError(f"--init {file} cannot be read: {error.strerror or error}; {EXPECTED}") from None
    except safetensors.SafetensorError as error:
        with open(file, "rb") as opened:
            head = opened.read(32).lstrip()
        reason = next((kind for start, kind in LOOK_ALIKES.items() if head.startswith(start)), error)
        raise InputError(f"--init {file} is not a whole safetensors file ({reason}); {EXPECTED}") from None


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
    shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
    if "wte.weight" not in shapes or not any(name.startswith("h.0.") for name in shapes):
        raise InputError(f"--init {file} is not a GPT-2: it holds {', '.join(sorted(shapes)[:3])} ...; {EXPECTED}")
    check_size(path, shapes, config)
    check_described(file, config)
    wanted = gpt2_shapes(config)
    for name in sorted(wanted.keys() | shapes.keys()):
        expected, found = wanted.get(name, "absent"), shapes.get(name, "absent")
        if expected != found:
            raise InputError(f"--init {path} is not a GPT-2: {name} should be {expected}, is {found}; {EXPECTED}")
    for name, found in slices.items():
        dtype = found.get_dtype()
        if dtype not in DTYPES:
            raise InputError(f"--init {path}: {name} is stored as {dtype}; give the weights in one of {', '.join(DTYPES)}")
    return file


def gpt2_shapes(config: Config) -> dict[str, tuple]:
    """Return {GPT-2's name: shape} for a model of config's sizes."""
    d, f = config.width, config.feed_forward
    shapes = {"wte.weight": (config.vocabulary, d), "wpe.weight": (config.max_positions, d)}
    matrices = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, f), "mlp.c_proj": (f, d)}
    norms = ["ln_f", *(f"h.{i}.{name}" for i in range(config.layers) for name in NORMS)]
    shapes |= {f"{norm}.{kind}": (d,) for norm in norms for kind in ("weight", "bias")}
    for i in range(config.layers):
        shapes |= {f"h.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"h.{i}.{name}.bias": shape[1:] for name, shape in matrices.items()}
    return shapes


def renamed(tensors: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Return {our name: tensor} of GPT-2's tensors: matrices transposed; query, key and value split."""
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


def of_ours(parameters: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Return {GPT-2's name: tensor} of a pretrained_recurrence model's parameters, without the module: the inverse of renamed."""
    theirs = {"wte.weight": parameters["embedding"], "wpe.weight": parameters["positions"]}
    theirs |= {"ln_f.weight": parameters["final_norm.scale"], "ln_f.bias": parameters["final_norm.bias"]}
    for i in range(config.layers):
        ours = {name.removeprefix(f"layers.{i}."): p for name, p in parameters.items() if name.startswith(f"layers.{i}.")}
        for name, own in NORMS.items():
            theirs |= {f"h.{i}.{name}.weight": ours[f"{own}.scale"], f"h.{i}.{name}.bias": ours[f"{own}.bias"]}
        for name, own in MATRICES.items():
            theirs |= {f"h.{i}.{name}.weight": ours[own].t(), f"h.{i}.{name}.bias": ours[f"{own}_bias"]}
        parts = ("query", "key", "value")
        theirs[f"h.{i}.attn.c_attn.weight"] = torch.cat([ours[part] for part in parts]).t()
        theirs[f"h.{i}.attn.c_attn.bias"] = torch.cat([ours[f"{part}_bias"] for part in parts])
    return {f"transformer.{name}": tensor for name, tensor in theirs.items()}


def described_gpt2(config: Config) -> dict:
    """The config.json of a GPT-2 of these sizes, for the package transformers."""
    end = 50256 if config.vocabulary == 50257 else None
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocabulary,
        "n_positions": config.max_positions, "n_embd": config.width, "n_layer": config.layers, "n_head": config.heads,
        "n_inner": config.feed_forward, "bos_token_id": end, "eos_token_id": end, "tie_word_embeddings": True,
    } | {name: values[0] for name, values in COMPUTED.items()}  # fmt: skip


def check_size(path: str | Path, shapes: dict[str, tuple], config: Config) -> None:
    """Raise InputError if a GPT-2 of these shapes differs in size from config; the message lists the options to give."""
    words, positions, inner = (shapes.get(name, ()) for name in ("wte.weight", "wpe.weight", "h.0.mlp.c_fc.bias"))
    if len(words) != 2 or len(positions) != 2 or len(inner) != 1:
        raise InputError(f"--init {path} is not a GPT-2: wte.weight and wpe.weight are {words}, {positions}; {EXPECTED}")
    vocabulary, width = words
    if vocabulary != config.vocabulary:
        raise InputError(
            f"--init {path} has a vocabulary of {vocabulary}, the model's is {config.vocabulary}; "
            "choose the --tokenizer that it was trained with"
        )
    layers = sum(re.fullmatch(r"h\.\d+\.ln_1\.weight", name) is not None for name in shapes)
    found = {"layers": layers, "width": width, "max_positions": positions[0], "feed_forward": inner[0]}
    other = {name: size for name, size in found.items() if size != getattr(config, name)}
    if not other:
        return
    do = " ".join(f"{option_name(name)} {size}" for name, size in other.items())
    do += " and its --heads" if "width" in other else ""
    if "layers" in other and (layers, width) in PUBLISHED:
        do = f"--preset {PUBLISHED[layers, width]}"
    theirs = ", ".join(f"{name} {size}" for name, size in other.items())
    ours = ", ".join(f"{name} {getattr(config, name)}" for name in other)
    raise InputError(f"--init {path} has {theirs}, the model has {ours}; give {do}")


def check_described(file: Path, config: Config) -> None:
    """Raise InputError if the config.json beside a GPT-2 says that it computes something other than our model.

    No shape shows the number of heads. config.json gives it, or else the size, if a GPT-2 of that size is published.
    """
    try:
        described = dict(json.loads((file.parent / SETTINGS).read_text()))
    except (OSError, TypeError, ValueError, RecursionError):  # no file, or no JSON object in it
        described = {}
    heads = described.get("n_head")
    if heads is None and (config.layers, config.width) in PUBLISHED:
        heads = config.width // 64
    if heads not in (None, config.heads):
        raise InputError(f"--init {file} has {heads} heads, the model has {config.heads}; give --heads {heads}")
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
