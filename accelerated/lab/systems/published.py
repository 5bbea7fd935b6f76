"""RoBERTa's published weights and HotpotQA's files, for the paper's own size of Table 3: questions.py has the command.

All files are in one folder, under the names that they are published with.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from accelerated.data.tokenizers import tokenizer_of_file
from accelerated.lab.systems import reader
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.systems.two_hops import Question
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import file_checksum
from accelerated.training.process import choose_device

OFFSET = 2  # rows of RoBERTa's position embedding before position 0: it counts from its padding's id on
TRAIN, DEV, WEIGHTS = "hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json", "model.safetensors"
FILES = f"a folder with HotpotQA's {TRAIN} and {DEV}, and RoBERTa's {WEIGHTS}, config.json, vocab.json and merges.txt"
NAMES = {name: f"attention.self.{name}" for name in ("query", "key", "value")}  # {ours: RoBERTa's} of a layer
NAMES |= {"output": "attention.output.dense", "norm": "attention.output.LayerNorm"}
NAMES |= {"mlp_hidden": "intermediate.dense", "mlp_output": "output.dense", "mlp_norm": "output.LayerNorm"}
HEAD = {"masked.hidden": "lm_head.dense", "masked.norm": "lm_head.layer_norm"}
PAPERS = {"rate": 2e-5, "epochs": 4, "questions": 30_000, "batch": 32}  # section 5.4, which does not give the batch


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSON file; raises InputError if it is not in HotpotQA's format."""
    try:
        return [
            Question(
                str(entry["question"]),
                tuple((str(title), tuple(map(str, sentences))) for title, sentences in entry["context"]),
                str(entry["answer"]),
                tuple((str(title), int(index)) for title, index in entry["supporting_facts"]),
            )
            for entry in json.loads(path.read_bytes())
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a file of HotpotQA ({error!r}); give {TRAIN} or {DEV}") from None


def load_published(model: Roberta, path: Path) -> None:
    """Load RoBERTa's model.safetensors into the model; the recurrence and the answer's head keep their initial weights.

    Its token types are added to its positions, which computes the same, because there is one type. A file of the encoder alone
    leaves the masked head as it is. Raises InputError if the file is not a RoBERTa of the config's sizes.
    """
    safetensors = optional_package("safetensors", "RoBERTa's weights need", "gpt2")
    layers = {f"layers.{i}.{ours}": f"encoder.layer.{i}.{NAMES[ours]}" for i in range(model.config.layers) for ours in NAMES}
    try:
        with safetensors.safe_open(path, "pt") as file:
            theirs = {name.removeprefix("roberta."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        positions = theirs["embeddings.position_embeddings.weight"][OFFSET : OFFSET + model.config.segment]
        weights = {"positions": positions + theirs["embeddings.token_type_embeddings.weight"][0]}
        weights["embedding"] = theirs["embeddings.word_embeddings.weight"]
        if "lm_head.bias" in theirs:
            layers, weights["masked.bias"] = layers | HEAD, theirs["lm_head.bias"]
        for ours, name in (layers | {"embedding_norm": "embeddings.LayerNorm"}).items():
            weight, bias = (".scale", ".bias") if ours.endswith("norm") else ("", "_bias")
            weights |= {ours + weight: theirs[f"{name}.weight"], ours + bias: theirs[f"{name}.bias"]}
        model.load_state_dict(model.state_dict() | weights)
    except (OSError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} is not a RoBERTa of these sizes ({error}); give {FILES}") from None


def published_config(folder: Path) -> Roberta.Config:
    """The Config of a folder with RoBERTa's config.json; raises InputError if it does not describe a RoBERTa."""
    path = folder / "config.json"
    names = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    try:
        published = json.loads(path.read_bytes())
        if published["model_type"] != "roberta":
            raise ValueError(f"it is a {published['model_type']}")
        sizes = {"module_width": published["hidden_size"], "segment": published["max_position_embeddings"] - OFFSET}
        return Roberta.Config(*map(published.get, names), dropout=published["hidden_dropout_prob"], **sizes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not describe a RoBERTa ({error!r}); give {FILES}") from None


def tokenizer(folder: Path) -> reader.Tokenizer:
    """The tokenizer of a folder with RoBERTa's vocab.json and merges.txt; raises InputError if they cannot be opened."""
    bpe = tokenizer_of_file(folder / "vocab.json", f"give {FILES}")
    return reader.Tokenizer(bpe, 0, *map(bpe.model.token_to_id, ("<s>", "<pad>", "</s>", "<mask>")))


def settings(folder: Path) -> dict:
    """What runs of the same record have in common."""
    return PAPERS | {"files": [file_checksum(folder / name) for name in (TRAIN, DEV, WEIGHTS)]}


def task(folder: Path) -> reader.Task:
    """HotpotQA's questions and RoBERTa's published weights, as in section 5.4; raises InputError if a file cannot be read."""
    tokens, config, questions = tokenizer(folder), published_config(folder), read_questions(folder / TRAIN)
    drawn = np.random.default_rng(0).permutation(len(questions))[: PAPERS["questions"]]
    examples = (reader.cut(questions[number], tokens, config.segment) for number in drawn)
    chosen = [example for example in examples if example.answer is not None]

    def model(recurrent: bool, seed: int) -> Roberta:
        """RoBERTa; the seed draws the weights of the recurrence and of the answer's head."""
        roberta = Roberta(dataclasses.replace(config, recurrent=recurrent), seed)
        load_published(roberta, folder / WEIGHTS)
        return roberta.to(choose_device("auto"))

    stages = [(chosen, PAPERS["epochs"] * len(chosen) // PAPERS["batch"])]
    asked = [reader.cut(question, tokens, config.segment) for question in read_questions(folder / DEV)]
    return reader.Task(model, tokens.pad, stages, asked, PAPERS["batch"], PAPERS["rate"])
