"""A published GPT-2, or another decoder, as the contents of a run's checkpoint.

GPT-2's tensors are wte.weight (V, D), wpe.weight, and for each layer i h.{i}.ln_1,
h.{i}.attn.c_attn (D, 3D: query, key and value), h.{i}.attn.c_proj, h.{i}.ln_2, h.{i}.mlp.c_fc and
h.{i}.mlp.c_proj, then ln_f, each with weight and bias. The names may have the prefix
`transformer.`. The matrices are (in, out), ours (out, in). Masks (attn.bias, attn.masked_bias) are
ignored. lm_head.weight must be absent or equal to wte.weight. The number of heads is in config.json
beside it, else heads are 64 wide. The tokenizer is the folder's own (vocab.json and merges.txt, or
tokenizer.json), else tiktoken's gpt2.

The package transformers reads other decoders.
"""

import dataclasses
import json
import re
from pathlib import Path

import torch

from accelerated.data.tokenizers import tokenizer_of_file
from accelerated.presets.pretrained_recurrence import GPT2, DecoderConfig
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
EXPECTED = (
    "expected GPT-2 in safetensors, such as model.safetensors of openai-community/gpt2, "
    "or another decoder's folder with its config.json"
)


def load_gpt2(file: Path, described: dict) -> dict:
    """Load a plain GPT-2 as the contents of a checkpoint at step 0.

    `described` is the config.json beside its safetensors file, {} if there is none. Raises
    InputError if the file is not a GPT-2, or stores integers.
    """
    tensors = read_tensors(file)
    published = of_gpt2(tensors)
    config = config_of(file, published, described)
    check_computed(file, described)
    try:
        own = renamed(published, config.layers)
    except ValueError as error:
        raise InputError(f"{file} is not a GPT-2: {error}; {EXPECTED}") from None
    for name, tensor in tensors.items():
        if name.endswith("lm_head.weight") and not torch.equal(tensor, published["wte.weight"]):
            raise InputError(
                f"{file}: lm_head.weight differs from wte.weight, but GPT-2 has one for both; "
                f"{EXPECTED}"
            )
    parameters = {name: tensor.float().contiguous() for name, tensor in own.items()}
    return contents_of(config, tokenizer_beside(file.parent), parameters)


def load_decoder(folder: Path, described: dict) -> dict:
    """Load another decoder's folder as the contents of a checkpoint at step 0.

    `described` is its config.json. Raises InputError if it has no tokenizer, if transformers cannot
    load it, or if check_logits refuses it.
    """
    from accelerated import any_decoder  # here: few runs need it

    tokenizer = tokenizer_beside(folder)
    if not Path(tokenizer).is_file():
        raise InputError(f"{folder} cannot be used: it has no tokenizer.json; put its own there")
    vocabulary = tokenizer_of_file(tokenizer).vocabulary
    base = json.dumps(described)
    try:
        own = any_decoder.package_config(base)
        causal = any_decoder.read_folder("AutoModelForCausalLM", folder, own)
        with any_decoder.of_the_folder():
            config = DecoderConfig(
                vocabulary=min(own.vocab_size, vocabulary),
                width=own.hidden_size,
                layers=own.num_hidden_layers,
                heads=own.num_attention_heads,
                max_positions=own.max_position_embeddings,
                segment=min(GPT2["segment"], own.max_position_embeddings),
                vectors=0,
                dropout=GPT2["dropout"],
                base=base,
            )
        any_decoder.check_logits(causal.eval(), config)
    except any_decoder.FolderError as error:
        raise InputError(
            f"{folder} cannot be used: {error}; "
            "expected a causal decoder, as AutoModelForCausalLM saves it"
        ) from None
    model = any_decoder.AnyDecoder(config, causal=causal)
    return contents_of(config, tokenizer, model.state_dict())


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


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """{name: tensor} of a safetensors file; raises InputError if it is not a whole one."""
    safetensors = optional_package("safetensors", "a GPT-2 needs", "gpt2")
    try:
        with safetensors.safe_open(file, "pt") as reader:
            names = reader.keys()
            return {name: reader.get_tensor(name) for name in names}
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{file} is not a whole safetensors file ({error}); {EXPECTED}") from None


def of_gpt2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors without the prefix of their names, without masks and the output layer's copy."""
    kept = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        if name != "lm_head.weight" and not BUFFERS.fullmatch(name):
            kept[name] = tensor
    return kept


# Which model it is


def config_of(file: Path, tensors: dict[str, torch.Tensor], described: dict) -> Config:
    """The Config of a GPT-2 with these tensors; raises InputError if it is not one.

    No shape shows its heads: config.json does.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        words, width = shapes["wte.weight"]
        positions, _ = shapes["wpe.weight"]
        [inner] = shapes["h.0.mlp.c_fc.bias"]
    except (KeyError, ValueError):
        held = ", ".join(sorted(shapes)[:3])
        raise InputError(f"{file} is not a GPT-2: it holds {held} ...; {EXPECTED}") from None
    layers = [name for name in shapes if re.fullmatch(r"h\.\d+\.ln_1\.weight", name)]
    try:
        return Config(
            vocabulary=words,
            width=width,
            max_positions=positions,
            feed_forward=inner,
            layers=len(layers),
            heads=described.get("n_head", width // 64),
            segment=min(GPT2["segment"], positions),
            vectors=0,
            dropout=GPT2["dropout"],
        )
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{file} is not a GPT-2 that fits our model: {error}; {EXPECTED}"
        ) from None


def check_computed(file: Path, described: dict) -> None:
    """Raise InputError if config.json says that it computes something else than our model."""
    for name, values in COMPUTED.items():
        if described.get(name, values[0]) not in values:
            ours = " or ".join(repr(value) for value in values)
            raise InputError(
                f"{file}: its config.json has {name} {described[name]!r}, our model has {ours}; "
                "give another GPT-2"
            )


def tokenizer_beside(folder: Path) -> str:
    """The tokenizer's file in a decoder's folder, or else the name of tiktoken's for GPT-2."""
    for name in ("tokenizer.json", "vocab.json"):
        own = folder / name
        if own.is_file():
            return str(own.absolute())
    return "gpt2"


# Its tensors


def renamed(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """{our name: tensor} of GPT-2's: matrices are transposed, query, key and value split.

    Raises ValueError unless the tensors have exactly GPT-2's names, and are floats.
    """
    left = dict(tensors)
    try:
        ours = {name: left.pop(theirs) for name, theirs in OF_MODEL.items()}
        for layer in range(layers):
            for name, theirs in OF_LAYER.items():
                ours[f"layers.{layer}.{name}"] = left.pop(f"h.{layer}.{theirs}").t()
            for kind, names in JOINED.items():
                parts = left.pop(f"h.{layer}.attn.c_attn.{kind}").t().chunk(3)
                for name, part in zip(names, parts, strict=True):
                    ours[f"layers.{layer}.{name}"] = part
    except KeyError as error:
        raise ValueError(f"it has no {error.args[0]}") from None
    if left:
        raise ValueError(f"it has {min(left)}, too")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is stored as {tensor.dtype}, and weights are floats")
    return ours
