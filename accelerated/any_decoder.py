"""Recurrence for any decoder that transformers can load: Llama, GPT-NeoX, OPT and others.

transformers runs the decoder; the recurrence module and the State are GPT-2's. At an insertion
layer the vectors are prepended to the window's tokens: that layer's own norm and projections read
them, and its outputs at their positions are dropped (decision 14).
"""

import contextlib
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from accelerated.attention.content import future_keys
from accelerated.presets.pretrained_recurrence import DecoderConfig
from accelerated.pretrained_recurrence import (
    PretrainedRecurrence,
    Recurrence,
    State,
    masked_with_inserted,
)
from accelerated.program.errors import InputError, optional_package
from accelerated.protocol import Model, initialise

transformers = optional_package("transformers", "this decoder needs", "decoders")
safetensors = optional_package("safetensors", "this decoder needs", "decoders")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# (pattern of a config.json's field, at any depth; values that are accepted; what it is): for other
# values transformers would run code, fetch kernels or unpack quantised weights
FOREIGN = (
    ("auto_map", (None,), "code of its own (auto_map)"),
    ("quantization_config", (None,), "quantised weights (quantization_config)"),
    (r"\w*(attn|experts)_implementation\w*", (None, "eager", "sdpa"), "kernels of its own"),
)
OTHER = "give one that transformers itself has, with weights of floats"
MOST_LAYERS = 10_000
FLOATS = ("F64", "F32", "F16", "BF16")  # types of a safetensors file


class FolderError(ValueError):
    """Raised if what a folder holds cannot be used; a mistake of ours is another error."""


class AnyDecoder(PretrainedRecurrence):
    """A decoder with the recurrence module; if `vectors` is 0, the decoder alone."""

    config: DecoderConfig
    output: nn.Parameter | None  # (V, D); None if it is the embedding
    kind = "decoder"

    def __init__(self, config: DecoderConfig, seed: int = 0, causal: Any = None):
        """Wrap `causal`, a transformers model; without it, build one anew from config.base."""
        Model.__init__(self, config)
        causal = causal or new_causal(config)
        self.decoder = causal.get_decoder()
        head = causal.get_output_embeddings().weight
        self.register_parameter("output", None if head is self.embedding else head)
        self.module = Recurrence(config) if config.vectors else None
        if self.module is not None:
            initialise(self.module, config.operations.init_module, seed)

    @property
    def embedding(self) -> nn.Parameter:  # pyright: ignore
        """The decoder's, (V, D)."""
        return self.decoder.get_input_embeddings().weight

    def output_matrix(self) -> Tensor:
        """(V, D), without rows of ids that the tokenizer does not have."""
        matrix = self.embedding if self.output is None else self.output
        return matrix[: self.config.vocabulary]

    def run_layers(self, tokens: Tensor, state: State) -> tuple[list[Tensor], Tensor]:
        """All layers' outputs for tokens (B, N), and the last one after the final norm."""
        inserted = self.vectors_to_insert(state)
        outputs = []

        def insert(layer: nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
            assert inserted is not None
            names = inspect.signature(layer.forward).parameters
            arguments = dict(zip(names, given, strict=False)) | named
            return (), with_vectors(arguments, inserted, state.present)

        def keep(layer: nn.Module, given: tuple, output: Any) -> Any:
            is_tuple = isinstance(output, tuple)
            rows = output[0] if is_tuple else output
            of_tokens = rows[:, -tokens.shape[1] :]  # the vectors' places are dropped
            outputs.append(of_tokens)
            return (of_tokens, *output[1:]) if is_tuple else of_tokens

        layers = next(part for part in self.decoder.modules() if isinstance(part, nn.ModuleList))
        with contextlib.ExitStack() as hooks:
            for number, layer in enumerate(layers, start=1):
                if inserted is not None and number in self.config.insertion_layers:
                    hooks.enter_context(layer.register_forward_pre_hook(insert, with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(keep))
            hidden = self.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return outputs, hidden


def with_vectors(arguments: dict, inserted: Tensor, present: Tensor) -> dict:
    """A layer's arguments with inserted vectors (B, S, D) before the window's rows (B, N, D).

    Its attention_mask (.., N, N) is true or 0 at seen keys; without one earlier ones are seen.
    """
    vectors = inserted.shape[1]
    x = arguments["hidden_states"]
    attention_mask = arguments.get("attention_mask")
    masked_keys = future_keys(x.shape[1], x.shape[1], x.device)
    if attention_mask is not None:
        seen = attention_mask[0, 0]
        masked_keys = ~seen if seen.dtype == torch.bool else seen < 0
    masked_keys = masked_with_inserted(masked_keys, vectors, present)  # (B, 1, N, S + N)
    masked_keys = functional.pad(masked_keys, (0, 0, vectors, 0))  # the vectors' own rows see all
    added = x.new_zeros(masked_keys.shape).masked_fill(masked_keys, -math.inf)

    def with_places(part: Tensor) -> Tensor:  # a rotary key at the first place is not rotated
        return torch.cat([part[:, :1].repeat_interleave(vectors, 1), part], 1)

    changed = {"hidden_states": torch.cat([inserted, x], 1), "attention_mask": added}
    for name in arguments.keys() & {"position_ids", "position_embeddings"}:
        changed[name] = tree_map_only(Tensor, with_places, arguments[name])
    return arguments | changed


def package_config(base: str) -> Any:
    """The transformers config in the text of a config.json.

    Raises FolderError if transformers does not know the model, or if the text has a field of
    FOREIGN or too many layers.
    """
    with of_the_folder():
        described = dict(json.loads(base))
        kind = str(described["model_type"])
    fields = [*fields_of(described)]
    for pattern, plain, what in FOREIGN:
        for name, value in fields:
            if re.fullmatch(pattern, name) and value not in plain:
                raise FolderError(f"its config.json names {what}; nothing of that is used")
    if kind not in transformers.CONFIG_MAPPING:
        raise FolderError(f"transformers {transformers.__version__} has no model_type {kind!r}")
    for name, value in described.items():
        if "layer" in name and isinstance(value, int) and value > MOST_LAYERS:
            raise FolderError(f"{name} is {value}; at most {MOST_LAYERS} are made")
    for name in ("dtype", "torch_dtype"):  # ours is given, and theirs may be no type
        described.pop(name, None)
    with of_the_folder():
        return transformers.CONFIG_MAPPING[kind].from_dict(described)


@contextlib.contextmanager
def of_the_folder() -> Iterator[None]:
    """Context manager: raise any exception of transformers inside as a FolderError."""
    try:
        yield
    except Exception as error:
        raise FolderError(reason_of(error)) from error


def fields_of(described: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of each field of what a JSON text holds, also of those inside others."""
    if isinstance(described, dict):
        yield from described.items()
        described = [*described.values()]
    if isinstance(described, list):
        for inner in described:
            yield from fields_of(inner)


def new_causal(config: DecoderConfig) -> Any:
    """A model of the package with drawn weights; all its dropout rates are config's.

    Raises InputError if config.base describes none.
    """
    try:
        own = package_config(config.base)
        for name in own.to_dict():
            if name.endswith(("dropout", "pdrop")):
                setattr(own, name, config.dropout)
        own.layerdrop = 0.0  # every layer's output is pooled
        dtype = torch.get_default_dtype()
        with of_the_folder():
            return transformers.AutoModelForCausalLM.from_config(own, dtype=dtype)
    except FolderError as error:
        raise InputError(f"this decoder cannot be made: {error}; {OTHER}") from None


def read_folder(kind: str, folder: Path, own: Any) -> Any:
    """Load a model of the transformers class `kind` from a folder's safetensors; own is its config.

    Runs no code of the folder and fetches nothing. Raises FolderError if transformers cannot load
    it, if a parameter is missing, or if one is stored as integers.
    """
    with of_the_folder():
        model, report = getattr(transformers, kind).from_pretrained(
            folder,
            config=own,
            dtype=torch.get_default_dtype(),
            output_loading_info=True,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
        )
    if report["missing_keys"]:
        raise FolderError(f"it has no {min(report['missing_keys'])}")
    names = [name for name, _ in model.named_parameters()]
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as reader:
            stored_names = reader.keys()
            for stored in stored_names:
                dtype = reader.get_slice(stored).get_dtype()
                is_parameter = any(n.endswith(stored) or stored.endswith(n) for n in names)
                if is_parameter and dtype not in FLOATS:
                    raise FolderError(f"{stored} is stored as {dtype}, and weights are floats")
    return model


def reason_of(error: Exception) -> str:
    """What an error says, in a line of at most 200 characters, or else its type's name."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@torch.no_grad()
def check_logits(causal: Any, config: DecoderConfig) -> None:
    """Raise FolderError unless a first window's logits equal those of `causal`.

    `causal` also reads later tokens, so a decoder that is not causal is refused.
    """
    every = tuple(range(1, config.layers + 1))
    config = dataclasses.replace(config, vectors=1, insertion_layers=every)
    model = AnyDecoder(config, causal=causal)
    tokens = torch.arange(min(8, config.max_positions))[None] % config.vocabulary
    with of_the_folder():
        expected = causal(tokens).logits[:, :4, : config.vocabulary]
    logits = model(tokens[:, :4], model.initial_state(1)).logits
    if (logits - expected).abs().max() > 1e-3 * expected.abs().max():
        raise FolderError(f"recurrence fits no {type(causal).__name__}: its logits would be others")
