"""What each memory learns: to hold a fact, to wait for it, to overwrite it, to ignore noise.

    python -m accelerated.lab.memory --out docs/results

Each row is a model with a state of 32 KiB. It is trained through the four stages of STAGES, each
from the weights of the one before, and asked the questions of TESTS after each. The record is
written after every stage, and what it holds is not trained again: the same command continues after
an interruption. Seed 0 of all rows comes first, then seed 1 of all rows, so that a partial record
is balanced.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import content_attention
from accelerated.attention.heads import Layers, project_heads
from accelerated.compression import error_of
from accelerated.compressive import Compressive, Layer
from accelerated.data.lanes import Lanes
from accelerated.data.recall import TELL, RecallConfig, RecallDocuments
from accelerated.data.tokenizers import open_tokenizer
from accelerated.data.windows import Document
from accelerated.evaluation.score import evaluate
from accelerated.lab.trials import machine
from accelerated.models import model_class, presets_of
from accelerated.program.errors import InputError
from accelerated.program.files import locked, written_whole
from accelerated.protocol import Model
from accelerated.replay import through_time
from accelerated.training.optimization import (
    average_and_clip,
    check_finite,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from accelerated.training.settings import TrainingConfig

SEEDS = (0, 1, 2, 3, 4)
SMALLEST_DIFFERENCE = 0.1  # of right answers, between means over the seeds: fixed before
SEGMENT = 32
BATCH = 16
STEPS = {"facts first": 1000, "anywhere": 400, "rewritten": 400, "distractors": 400}
TOLD = RecallConfig(
    anew=True, pairs=4, vary_pairs=True, questions=32, spacing=2, distance=52, vary_distance=True
)
STAGES = {
    "facts first": {},
    "anywhere": {"begin": 64},
    "rewritten": {"begin": 64, "rewrites": 4},
    "distractors": {"begin": 64, "rewrites": 4, "distractors": 0.2},
}
NEAR = 32  # tokens of filler from facts to questions
FAR = 8192
TESTS = {  # of 64 documents of 16 questions
    "at once": {"distance": 0},
    "near": {},
    "hold": {"distance": FAR},
    "wait": {"begin": FAR},
    "late": {"begin": 64},
    "distractors": {"distractors": 0.2},
    "distractors, 512": {"distance": 512, "distractors": 0.2},
    "64": {"distance": 64},
    "128": {"distance": 128},
    "512": {"distance": 512},
    "2048": {"distance": 2048},
}
SHARED = {"width": 64, "head_width": 16, "feed_forward": 256, "segment": SEGMENT, "dropout": 0.0}
SLOTS = {"encoder_layers": 1, "decoder_layers": 1, "slots": 128, "max_distance": 32}
STATES = {"layers": 2, "heads": 2, "window": 32, "recurrent_layers": (2,), "states": 64}
ROWS = {  # name: (model, changes of its config, rate)
    "Memformer, slots themselves": ("memformer", SLOTS | {"slot_value": "itself"}, 1e-3),
    "Memformer, slots projected": ("memformer", SLOTS | {"slot_value": "projected"}, 2e-3),
    "Block-Recurrent, LSTM gate": ("block_recurrent", STATES | {"gate": "lstm"}, 3e-3),
    "Block-Recurrent, fixed gate": ("block_recurrent", STATES | {"gate": "fixed"}, 3e-3),
    "Memorizing": (
        "memorizing",
        {"layers": 2, "heads": 2, "memory_layer": 2, "memory": 64, "retrieved": 8},
        3e-3,
    ),
    "Transformer-XL": ("compressive", {"layers": 2, "memory": 64, "compressed_memory": 0}, 3e-3),
    "Compressive": ("compressive", {"layers": 2, "memory": 32, "compressed_memory": 32}, 3e-3),
}


# The models


class SharpLayer(Layer):
    """A layer whose queries and keys have unit length, and which begins without distances."""

    def __init__(self, like: Layer, number: int):
        super().__init__(like.config, number)
        self.load_state_dict(like.state_dict())
        torch.nn.init.zeros_(self.distance_key)

    def project_own(self, h: Tensor) -> tuple[Tensor, ...]:
        query, key, value = super().project_own(h)
        scale = 10 * self.config.head_width**0.5  # attention divides by the root
        return scale * functional.normalize(query, dim=-1), functional.normalize(key, dim=-1), value

    def project_remembered(self, remembered: Tensor) -> tuple[Tensor, ...]:
        key, value = super().project_remembered(remembered)
        return functional.normalize(key, dim=-1), value

    def attention_reconstruction(
        self, query: Tensor, key: Tensor, value: Tensor, new: Tensor
    ) -> Tensor:
        evicted = slice(self.compressed_rows, self.compressed_rows + self.config.segment)
        with torch.no_grad():
            target = content_attention(query, key[:, :, evicted], value[:, :, evicted])
        matrices = [self.key.detach(), self.value.detach()]
        new_key, new_value = project_heads(new, self.config.heads, matrices)
        new_key = functional.normalize(new_key, dim=-1)
        out = content_attention(query.detach(), new_key, new_value)
        return error_of(self.config, out, target)


def make_model(row: str, seed: int) -> Model:
    """The model of a row, whose weights are drawn by the seed."""
    name, changes, _ = ROWS[row]
    config = presets_of(name).Config(**SHARED | changes)
    model = model_class(name)(config, seed)
    if isinstance(model, Compressive):
        sharp = [SharpLayer(layer, number) for number, layer in enumerate(model.layers)]
        model.layers = Layers(sharp)
    return model


def state_bytes(model: Model) -> int:
    """Bytes that a segment passes to the next one: 4 for a number, 1 for a token."""
    fields = model.initial_state(1)
    return sum(field.numel() * (4 if field.is_floating_point() else 1) for field in fields)


# Training and asking


def train(model: Model, recall: RecallConfig, rate: float, steps: int, seed: int) -> list[float]:
    """Train for so many updates of whole documents; returns the bits per answer of each tenth."""
    horizon = recall.length // SEGMENT
    training = TrainingConfig(steps=steps, batch=BATCH, learning_rate=rate, warmup=50)
    lanes = Lanes(RecallDocuments(recall, "train"), BATCH, SEGMENT, seed)
    optimizer = make_optimizer(model, training)
    state = model.initial_state(BATCH)
    torch.manual_seed(seed)
    losses = []
    for step in range(1, steps + 1):
        loss, _, state = through_time(model, lanes.rollout(horizon), state)
        average_and_clip(model, 1, training.clip)
        check_finite(step, {"loss": float(loss)})
        set_learning_rate(optimizer, learning_rate(step, training))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss) / math.log(2))
    return [round(float(np.mean(tenth)), 3) for tenth in np.array_split(losses, 10)]


def ask(model: Model) -> dict[str, float]:
    """The share of right answers in each test, and of a rewritten document's parts."""
    asked = {}
    for name, changes in TESTS.items():
        documents = documents_of(changes)
        asked[name] = right(model, documents)
    documents = documents_of({"rewrites": 1})
    asked["overwrite"] = right(model, [of_changed(each) for each in documents])
    asked["old value"] = right(model, [of_changed(each, old=True) for each in documents])
    asked["keep"] = right(model, [of_changed(each, others=True) for each in documents])
    return asked


def documents_of(changes: dict) -> list[Document]:
    """The 64 documents of a test."""
    sizes = {"anew": True, "pairs": 4, "questions": 16, "spacing": 2, "distance": NEAR}
    return list(RecallDocuments(RecallConfig(**sizes | changes), "test"))


def right(model: Model, documents: Sequence[Document]) -> float:
    """The share of right answers."""
    score = evaluate(model, documents, open_tokenizer("bytes"), len(documents))
    return round(score.accuracy, 4)


def of_changed(document: Document, old: bool = False, others: bool = False) -> Document:
    """A document whose answers count only about keys that were told again, or about the others.

    With old the target is the value that a key had at first.
    """
    told = np.flatnonzero(document.inputs == TELL)
    keys = document.inputs[told + 1]
    values = document.inputs[told + 2]
    again = [key for key in keys if (keys == key).sum() > 1]
    scored = document.scored & (np.isin(document.inputs, again) != others)
    targets = document.targets
    if old:
        first = dict(zip(keys[::-1].tolist(), values[::-1].tolist(), strict=True))
        targets = np.array([first.get(token, 0) for token in document.inputs.tolist()], np.uint8)
    return document._replace(targets=targets, scored=scored)


# The runs and their record


def new_record() -> dict:
    """A record without runs."""
    return {
        "smallest_difference": SMALLEST_DIFFERENCE,
        "batch": BATCH,
        "segment": SEGMENT,
        "steps": STEPS,
        "told": dataclasses.asdict(TOLD),
        "stages": STAGES,
        "near": NEAR,
        "tests": TESTS,
        "rows": {row: about(row) for row in ROWS},
        "machine": machine(),
        "torch": torch.__version__,
        "runs": {row: {} for row in ROWS},
    }


def about(row: str) -> dict:
    """What a row is."""
    model = make_model(row, 0)
    name, changes, rate = ROWS[row]
    return {
        "model": name,
        "config": SHARED | changes,
        "rate": rate,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": state_bytes(model),
    }


def read_record(path: Path) -> dict:
    """The record at path, or a new one; raises InputError if it is of other settings."""
    record = new_record()
    if not path.exists():
        return record
    found = json.loads(path.read_text())
    for name in ("batch", "segment", "steps", "told", "stages", "near", "tests", "rows"):
        if found.get(name) != json.loads(json.dumps(record[name])):
            raise InputError(f"{path} has runs of other {name}; give another --out")
    return found


def run(row: str, seed: int, record: dict, path: Path, weights: Path) -> None:
    """Train and ask the stages of a run that the record lacks; write the record after each."""
    stages = record["runs"][row].setdefault(str(seed), [])
    model = make_model(row, seed)
    kept = weights / f"{slug(row)}-{seed}.safetensors"  # of the last stage, in float32
    done = f"{slug(row)}-{seed}-{len(stages)}"
    if 0 < len(stages) < len(STAGES):
        if kept.exists() and safe_open(kept, "pt").metadata() == {"after": done}:
            model.load_state_dict(load_file(kept))
        else:
            stages.clear()
    for number, stage in enumerate(STAGES):
        if number < len(stages):
            continue
        began = time.monotonic()
        recall = dataclasses.replace(TOLD, **STAGES[stage])
        bits = train(model, recall, ROWS[row][2], STEPS[stage], 10 * seed + number)
        trained = time.monotonic()
        stages.append({"stage": stage, "bits": bits} | {"right": ask(model)})
        asked = time.monotonic()
        stages[-1]["seconds"] = [round(trained - began, 1), round(asked - trained, 1)]
        tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
        keep(tensors, kept, f"{slug(row)}-{seed}-{number + 1}")
        if seed == 0:
            halves = {name: value.half() for name, value in tensors.items()}
            keep(halves, weights / f"{slug(row)}-{slug(stage)}.safetensors", stage)
        record["date"] = datetime.date.today().isoformat()
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{row}, seed {seed}, {stage}: {stages[-1]}", flush=True)


def keep(tensors: dict[str, Tensor], path: Path, after: str) -> None:
    """Write weights, with what they were trained to."""
    with written_whole(path) as temporary:
        save_file(tensors, temporary, {"after": after})


def slug(words: str) -> str:
    """A name of a file."""
    return words.lower().replace(",", "").replace(" ", "-")


def main(argv: Sequence[str]) -> None:
    """Train what the record lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--weights", type=Path, default=Path("runs/memory"))
    options = parser.parse_args(argv)
    options.weights.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    path = options.out / "memory.json"
    with locked(path.with_suffix(".lock"), f"another process writes {path}; wait until it ends"):
        record = read_record(path)
        for seed, row in itertools.product(options.seeds, options.rows):
            run(row, seed, record, path, options.weights)


if __name__ == "__main__":
    main(sys.argv[1:])
