"""A published RoBERTa, a folder as the hub lays it, as our model; hotpotqa.py begins from it.

The folder has config.json, and model.safetensors or pytorch_model.bin. Its tensors may have the
prefix `roberta.`. Its positions count from the padding's id on, so the first two rows are never
read, and every token has the same type, whose vector ours adds to the positions. lm_head may be
missing: then the pretraining's head, which answers do not need, is drawn. Masks, the pooler and the
output layer's copy of the embedding are not read.
"""

import dataclasses
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from accelerated.lab.systems.roberta import Roberta
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import regular
from accelerated.training.settings import checked
from reference.roberta import Config

# {our name: theirs}; each has a weight (our scale, if a norm) and a bias
OF_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "mlp_hidden": "intermediate.dense",
    "mlp_output": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
OF_MODEL = {"embedding_norm": "embeddings.LayerNorm"}
OF_HEAD = {"masked.hidden": "lm_head.dense", "masked.norm": "lm_head.layer_norm"}
POSITIONS = "embeddings.position_embeddings.weight"
UNREAD = 2  # rows of POSITIONS
# {field of config.json: the value with which it computes the same as our model}
COMPUTED = {
    "model_type": "roberta",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "absolute",
    "pad_token_id": UNREAD - 1,
    "type_vocab_size": 1,
}
# {our field of Config: theirs of config.json}
SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "segment": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
}
EXPECTED = "expected a RoBERTa as the hub has it, such as FacebookAI/roberta-base"


def load_roberta(folder: Path, segment: int, recurrent: bool, seed: int) -> Roberta:
    """The model of a RoBERTa's folder, for windows of at most `segment` tokens.

    The seed draws what is not in it: the answer's head and, if recurrent, the vector's network.
    Raises InputError if it is no RoBERTa, or has fewer positions.
    """
    config = described_config(folder / "config.json", segment)
    model = Roberta(dataclasses.replace(config, recurrent=recurrent), seed)
    file, tensors = read_tensors(folder)
    own = model.state_dict()
    for name, value in renamed(file, tensors, config).items():
        if value.shape != own[name].shape:
            wrong = f"{name} should be {tuple(own[name].shape)}, is {tuple(value.shape)}"
            raise InputError(f"{file}: {wrong}; {EXPECTED}")
        own[name] = value
    model.load_state_dict(own)
    return model


def described_config(file: Path, segment: int) -> Config:
    """The Config that a config.json describes, with windows of at most `segment` tokens."""
    try:
        described = dict(json.loads(regular(file).read_text()))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read ({error}); {EXPECTED}") from None
    for name, ours in COMPUTED.items():
        if described.get(name, ours) != ours:
            wrong = f"{file} has {name} {described[name]!r}, our model has {ours!r}"
            raise InputError(f"{wrong}; {EXPECTED}")
    try:
        sizes = {ours: described[theirs] for ours, theirs in SIZES.items()}
        sizes["segment"] -= UNREAD
        config = checked(Config, sizes | {"module_width": sizes["width"]})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} describes no RoBERTa ({error}); {EXPECTED}") from None
    if segment > config.segment:
        raise InputError(f"--segment {segment}: {file} has {config.segment} positions; give less")
    return dataclasses.replace(config, segment=segment)


def read_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """(The file of weights in a folder, its tensors), without the prefix `roberta.`."""
    file = folder / "model.safetensors"
    if file.exists():
        read = optional_package("safetensors.torch", "a RoBERTa needs", "gpt2").load_file
    else:
        file = folder / "pytorch_model.bin"
        read = partial(torch.load, map_location="cpu", weights_only=True)
    try:
        tensors = read(regular(file))
        return file, {name.removeprefix("roberta."): value for name, value in tensors.items()}
    except Exception as error:  # both packages raise many types
        reason = str(error).partition("\n")[0]
        raise InputError(f"{file} is no whole file of weights ({reason}); {EXPECTED}") from None


def renamed(file: Path, theirs: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """{our name: tensor}, in the default type, of what a RoBERTa has of ours."""
    names = dict(OF_MODEL)
    for layer in range(config.layers):
        for own, other in OF_LAYER.items():
            names[f"layers.{layer}.{own}"] = f"encoder.layer.{layer}.{other}"
    has_head = "lm_head.bias" in theirs
    if has_head:
        names |= OF_HEAD
    try:
        types = theirs["embeddings.token_type_embeddings.weight"]
        positions = theirs[POSITIONS][UNREAD:][: config.segment]
        ours = {
            "embedding": theirs["embeddings.word_embeddings.weight"],
            "positions": positions + types[0],
        }
        for own, other in names.items():
            is_norm = own.endswith("norm")
            ours[f"{own}.scale" if is_norm else own] = theirs[f"{other}.weight"]
            ours[f"{own}.bias" if is_norm else f"{own}_bias"] = theirs[f"{other}.bias"]
    except KeyError as error:
        raise InputError(f"{file} has no {error}; {EXPECTED}") from None
    if has_head:
        ours["masked.bias"] = theirs["lm_head.bias"]
    return {name: value.to(torch.get_default_dtype()) for name, value in ours.items()}
