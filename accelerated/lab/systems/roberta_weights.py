"""A published RoBERTa, a folder as the hub lays it, as our model; hotpotqa.py begins from it.

The package transformers reads the folder. RoBERTa's positions count from the padding's id on, so
the first two rows are never read. Every token has the same type, whose vector ours adds to the
positions.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from torch import Tensor

from accelerated.lab.systems.roberta import Config, Roberta
from accelerated.program.errors import InputError
from accelerated.training.folder import read_settings
from accelerated.training.settings import checked

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
OF_MODEL = {
    "embedding_norm": "roberta.embeddings.LayerNorm",
    "masked.hidden": "lm_head.dense",
    "masked.norm": "lm_head.layer_norm",
}
UNREAD = 2  # rows of positions
# {field of their config: the value with which it computes the same as our model}
COMPUTED = {
    "model_type": "roberta",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "absolute",
    "pad_token_id": UNREAD - 1,
    "type_vocab_size": 1,
}
# {our field of Config: theirs}
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


def load_roberta(folder: Path, config: Config, seed: int) -> Roberta:
    """The model of a RoBERTa's folder, which described_config describes.

    The seed draws what is not in it: the answer's head and, if recurrent, the vector's network.
    Raises InputError if it lacks weights.
    """
    with opening(folder) as package:
        own = package.package_config(described_by(folder))
        theirs = package.read_folder("AutoModelForMaskedLM", folder, own)
    model = Roberta(config, seed)
    model.load_state_dict(model.state_dict() | renamed(theirs.state_dict(), config))
    return model


@contextlib.contextmanager
def opening(folder: Path) -> Iterator[ModuleType]:
    """Yield any_decoder.py; what is raised inside becomes an InputError about the folder."""
    from accelerated import any_decoder  # here: it imports transformers

    try:
        yield any_decoder
    except Exception as error:  # of the package: any
        reason = any_decoder.reason_of(error)
        raise InputError(f"{folder} cannot be used ({reason}); {EXPECTED}") from None


def described_by(folder: Path) -> str:
    """What a folder's config.json says."""
    return json.dumps(read_settings(folder))


def described_config(folder: Path, segment: int) -> Config:
    """The Config of a RoBERTa's folder, with windows of at most `segment` tokens."""
    with opening(folder) as package:
        described = package.package_config(described_by(folder)).to_dict()
    for name, ours in COMPUTED.items():
        if described.get(name, ours) != ours:
            raise InputError(
                f"{folder} has {name} {described[name]!r}, our model has {ours!r}; {EXPECTED}"
            )
    sizes = {ours: described[theirs] for ours, theirs in SIZES.items()}
    sizes["segment"] -= UNREAD
    if segment > sizes["segment"]:
        raise InputError(
            f"--segment {segment}: {folder} has {sizes['segment']} positions; give less"
        )
    sizes |= {"segment": segment, "module_width": sizes["width"]}
    try:
        return checked(Config, sizes)
    except (TypeError, ValueError) as error:
        raise InputError(f"{folder} describes no RoBERTa ({error}); {EXPECTED}") from None


def renamed(theirs: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """{our name: tensor} of what a RoBERTa has of ours."""
    names = dict(OF_MODEL)
    for layer in range(config.layers):
        for own, other in OF_LAYER.items():
            names[f"layers.{layer}.{own}"] = f"roberta.encoder.layer.{layer}.{other}"
    positions = theirs["roberta.embeddings.position_embeddings.weight"]
    type_of_all = theirs["roberta.embeddings.token_type_embeddings.weight"]  # (1, D)
    ours = {
        "embedding": theirs["roberta.embeddings.word_embeddings.weight"],
        "positions": positions[UNREAD:][: config.segment] + type_of_all,
        "masked.bias": theirs["lm_head.bias"],
    }
    for own, other in names.items():
        is_norm = own.endswith("norm")
        weight = f"{own}.scale" if is_norm else own
        bias = f"{own}.bias" if is_norm else f"{own}_bias"
        ours[weight] = theirs[f"{other}.weight"]
        ours[bias] = theirs[f"{other}.bias"]
    return ours
