"""A published GPT-2 from a safetensors file for a pretrained_recurrence model: what --init checks (run.py) and loads.

The file names its tensors wte.weight (V, D), wpe.weight, and for each layer i h.{i}.ln_1, h.{i}.attn.c_attn (D, 3D: query, key
and value), h.{i}.attn.c_proj, h.{i}.ln_2, h.{i}.mlp.c_fc and h.{i}.mlp.c_proj, then ln_f, each with weight and bias; a prefix
`transformer.` may stand before them. Matrices are (in, out), ours (out, in). Masks (attn.bias, attn.masked_bias) are left out,
and lm_head.weight is absent or equal to wte.weight.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from accelerated.errors import InputError, option_name
from accelerated.training.settings import GPT2_SIZES
from reference.pretrained_recurrence import Config

BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
NORMS = {"ln_1": "norm", "ln_2": "mlp_norm"}
MATRICES = {"attn.c_proj": "output", "mlp.c_fc": "mlp_hidden", "mlp.c_proj": "mlp_output"}
# The fields of config.json that change what GPT-2 computes: the values that compute what the model here does
COMPUTED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
}  # fmt: skip
PUBLISHED = {size: name for name, size in GPT2_SIZES.items()}
DTYPES = ("F16", "BF16", "F32", "F64")
LOOK_ALIKES = {  # what a file is instead, by its first bytes
    b"version https://git-lfs": "it is a Git LFS pointer: git lfs pull fetches the file", b"<": "it is an HTML page",
    b"PK\x03\x04": "it is a pickle, which could run code", b"\x80": "it is a pickle, which could run code",
    b"\x89HDF": "it is an HDF5 file, TensorFlow's",
}  # fmt: skip
EXPECTED = "expected GPT-2 in safetensors, the file model.safetensors that openai-community/gpt2 and its larger siblings publish"


def open_file(path: str | Path) -> tuple[Path, Any]:
    """(file, safetensors' reader of it) of the file that path names: itself, or model.safetensors in a folder.

    The reader has read the header alone. Raises InputError for what is no whole safetensors file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise InputError("--init of a safetensors file needs the package safetensors: pip install safetensors") from None
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        missing = "neither model.safetensors nor checkpoint.pt in this folder" if path.is_dir() else "no such file"
        raise InputError(f"--init {path}: {missing}; {EXPECTED}, or a run of train.py")
    try:
        return file, safe_open(file, "pt")
    except OSError as error:
        raise InputError(f"--init {file} cannot be read: {error.strerror or error}; {EXPECTED}") from None
    except SafetensorError as error:
        with open(file, "rb") as opened:
            head = opened.read(32).lstrip()
        reason = next((kind for start, kind in LOOK_ALIKES.items() if head.startswith(start)), error)
        raise InputError(f"--init {file} is not a whole safetensors file ({reason}); {EXPECTED}") from None


def of_gpt2(named: dict) -> dict:
    """{GPT-2's name: value} of what a file holds: without the prefix transformer., the masks and the output's copy of wte."""
    named = {name.removeprefix("transformer."): value for name, value in named.items()}
    return {name: value for name, value in named.items() if name != "lm_head.weight" and not BUFFERS.fullmatch(name)}


def check_gpt2(path: str | Path, config: Config) -> Path:
    """The file that path names, if its header says that it is a GPT-2 of config's sizes; raises InputError otherwise.

    Of the tensors nothing is read.
    """
    file, reader = open_file(path)
    slices = of_gpt2({name: reader.get_slice(name) for name in reader.keys()})  # noqa: SIM118  it is no dict
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


def renamed(tensors: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
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


def check_size(path: str | Path, shapes: dict[str, tuple], config: Config) -> None:
    """Raise InputError if a GPT-2 of these shapes has another size than config; the message lists the options to give."""
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
    """Raise InputError if the config.json beside a GPT-2 says that it computes something else than a model of config.

    No shape shows the number of heads: it is that of config.json, or else that of the published GPT-2 of this size.
    """
    try:
        described = dict(json.loads((file.parent / "config.json").read_text()))
    except (OSError, TypeError, ValueError):  # no file, or no JSON object in it
        described = {}
    heads = described.get("n_head")
    if heads is None and (config.layers, config.width) in PUBLISHED:
        heads = config.width // 64
    if heads not in (None, config.heads):
        raise InputError(f"--init {file} has {heads} heads, the model's heads are {config.heads}; give --heads {heads}")
    for name, values in COMPUTED.items():
        if described.get(name, values[0]) not in values:
            raise InputError(
                f"--init {file}: its config.json has {name} {described[name]!r}, and the model here computes with "
                f"{' or '.join(map(repr, values))}; another GPT-2 is needed"
            )


def load_gpt2(model: torch.nn.Module, path: str | Path) -> None:
    """Put a GPT-2's weights into a pretrained_recurrence model, whose recurrence module stays as it starts.

    Raises InputError if the file is no GPT-2, has another architecture or size than model.config, or values that are not finite.
    """
    _, reader = open_file(check_gpt2(path, model.config))
    tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  it is no dict
    heads = [tensor for name, tensor in tensors.items() if name.endswith("lm_head.weight")]
    tensors = of_gpt2(tensors)
    if any(not torch.equal(head, tensors["wte.weight"]) for head in heads):
        raise InputError(f"--init {path}: lm_head.weight differs from wte.weight, and GPT-2 has one for both; {EXPECTED}")
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"--init {path}: {name} has values that are not finite; download it again")
    model.load_state_dict(renamed(tensors, model.config), strict=False)
