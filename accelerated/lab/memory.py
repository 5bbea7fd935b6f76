"""What each memory learns: to hold a fact, to wait for it, to overwrite it, to ignore noise.

    python -m accelerated.lab.memory --out docs/results
    python -m accelerated.lab.memory --ask docs/results/weights/FILE

Each row is a model with a state of 32 KiB. It is trained through the four stages of STAGES, each
from the weights of the one before, and asked the questions of TESTS after each. The record is
written after every stage, and what it holds is not trained again: the same command continues after
an interruption. Seed 0 of all rows comes first, then seed 1 of all rows, so that a partial record
is balanced.
"""

import itertools
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

from accelerated.compressive import Compressive
from accelerated.data.lanes import Lanes
from accelerated.data.recall import ALPHABET, ASK, FILLER, TELL, RecallConfig, RecallDocuments
from accelerated.data.windows import Document
from accelerated.lab.harness import (
    HEADLINE_SEEDS,
    RESULTS,
    origin,
    parser_of,
    read_record,
    run_command,
    write_record,
)
from accelerated.memformer import Memformer
from accelerated.models import model_class, presets_of
from accelerated.program.errors import InputError
from accelerated.program.files import locked, written_whole
from accelerated.protocol import Model, evaluating
from accelerated.replay import through_time
from accelerated.training.optimization import (
    average_and_clip,
    check_finite,
    count_parameters,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from accelerated.training.settings import TrainingConfig

WEIGHTS = RESULTS / "weights"  # of Memformer and Block-Recurrent, which the book shows
SMALLEST_DIFFERENCE = 0.1  # of right answers, between means over the seeds: fixed before
SEGMENT = 32
BATCH = 16
WARMUP = 50
TOLD: dict[str, Any] = {
    "anew": True,
    "pairs": 4,
    "vary_pairs": True,
    "values": 6,
    "vary_distance": True,
    "spacing": 2,
}
SHORT = {"distance": 20, "questions": 16}  # documents of two segments
LONG = {"distance": 116, "questions": 32}  # of six, with 64 tokens before the facts of eight
ANYWHERE = LONG | {"begin": 64}
REWRITTEN = ANYWHERE | {"rewrites": 4}
STAGES = {  # {stage: [(changes of the task, updates, share of the row's rate)]}, in this order
    "facts first": [(SHORT, 3000, 1.0), (LONG, 1000, 1.0)],
    "anywhere": [(ANYWHERE, 500, 0.5)],
    "rewritten": [(REWRITTEN, 1000, 0.5)],
    "distractors": [(REWRITTEN | {"distractors": 0.2}, 1000, 0.5)],
}
ASKED: dict[str, Any] = {"anew": True, "pairs": 4, "values": 6, "spacing": 2, "questions": 16}
NEAR = 32  # tokens from facts to questions, which attention spans in every row
BEYOND = 128  # of Memformer and Block-Recurrent, memory alone
FAR = 8192
TESTS = {  # of 64 documents of 16 questions
    "at once": {"distance": 0},
    "near": {"distance": NEAR},
    "128": {"distance": BEYOND},
    "512": {"distance": 512},
    "2048": {"distance": 2048},
    "hold": {"distance": FAR},
    "late": {"begin": 64, "distance": BEYOND},
    "wait, near": {"begin": FAR, "distance": NEAR},
    "wait": {"begin": FAR, "distance": BEYOND},
    "distractors, near": {"distractors": 0.2, "distance": NEAR},
    "distractors": {"distractors": 0.2, "distance": BEYOND},
    "distractors, 512": {"distractors": 0.2, "distance": 512},
}
TOLD_AGAIN = {  # name: (filler in which a fact is told again, filler between that and questions)
    ", near": (NEAR, 0),
    "": (BEYOND, 0),  # of the new values about three of four stand within attention's reach
    ", later": (BEYOND, BEYOND),  # none does
}
SHARED = {"width": 64, "head_width": 16, "feed_forward": 256, "segment": SEGMENT, "dropout": 0.0}
SLOTS = {
    "encoder_layers": 1,
    "decoder_layers": 2,
    "feed_forward": 128,
    "slots": 128,
    "max_distance": 32,
}
STATES = {"layers": 2, "heads": 2, "window": 32, "recurrent_layers": (2,), "states": 64}
ROWS = {  # name: (model, changes of its config, rate)
    "Memformer, slots themselves": ("memformer", SLOTS | {"slot_value": "itself"}, 2e-3),
    "Block-Recurrent, LSTM gate": ("block_recurrent", STATES | {"gate": "lstm"}, 1e-2),
    "Memformer, slots projected": ("memformer", SLOTS | {"slot_value": "projected"}, 2e-3),
    "Block-Recurrent, fixed gate": ("block_recurrent", STATES | {"gate": "fixed"}, 1e-2),
    "Memorizing": (
        "memorizing",
        {"layers": 2, "heads": 2, "memory_layer": 2, "memory": 64, "retrieved": 8},
        1e-2,
    ),
    "Transformer-XL": ("compressive", {"layers": 2, "memory": 64, "compressed_memory": 0}, 3e-3),
    "Compressive": ("compressive", {"layers": 2, "memory": 32, "compressed_memory": 32}, 3e-3),
    "Gated DeltaNet": (
        "gated_deltanet",
        {"layers": 2, "heads": 2, "head_width": 32, "value_width": 53, "feed_forward": 170},
        3e-3,
    ),
}
LARGER_QUERIES = 4.0  # times as large as drawn: a key that fits stands out
LOOK_BEFORE = 8.0  # how much the token before stands out at first


# The models


def make_model(row: str, seed: int) -> Model:
    """The model of a row, whose weights are drawn by the seed, and which can learn the task soon.

    Attention without unit lengths finds out late that a value belongs to the key before it. So
    Memformer, Transformer-XL and Compressive begin with larger queries and with one head that looks
    at the token before. The trained weights are their references' as they are.
    """
    name, changes, _ = ROWS[row]
    config = presets_of(name).Config(**SHARED | changes)
    model = model_class(name)(config, seed)
    with torch.no_grad():
        if isinstance(model, Memformer):
            begin_memformer(model)
        if isinstance(model, Compressive):
            begin_compressive(model)
    return model


def begin_memformer(model: Memformer) -> None:
    """Larger queries everywhere; head 0 of each stack's first layer looks at the token before."""
    head = slice(model.config.head_width)
    for name, value in model.named_parameters():
        if name.endswith(".query"):
            value.mul_(LARGER_QUERIES)
    for stack, causal in ((model.encoder, False), (model.decoder, True)):
        attention = stack.layers[0].attention
        before = model.config.distances(causal).tolist().index(1)  # the row of distance 1
        direction = functional.normalize(attention.positions[before], dim=0)
        attention.query[head] *= 0.1 / LARGER_QUERIES
        attention.get_parameter("query_bias")[head] = LOOK_BEFORE * direction


def begin_compressive(model: Compressive) -> None:
    """Larger queries, no distances; but head 0 of the first layer looks at the token before."""
    width = model.config.width
    for layer in model.layers:
        layer.query.mul_(LARGER_QUERIES)
        layer.distance_key.zero_()
    first = model.layers[0]
    first.query[: model.config.head_width] *= 0.1 / LARGER_QUERIES
    frequency = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    # Times the sinusoids of distance t this is the sum of cos((t - 1) frequency), largest at 1
    first.distance_key[0] = torch.cat([frequency.sin(), frequency.cos()])
    first.distance_bias[0] = 0
    first.distance_bias[0, 0] = LOOK_BEFORE * model.config.head_width**0.5


def state_bytes(model: Model) -> int:
    """Bytes that a segment passes to the next one: 4 for a number, 1 for a token."""
    fields = model.initial_state(1)
    return sum(field.numel() * (4 if field.is_floating_point() else 1) for field in fields)


# Training and asking


def train(model: Model, told: dict, rate: float, steps: int, seed: int) -> list[float]:
    """Train for so many updates of whole documents; returns the bits per answer of each tenth."""
    recall = RecallConfig(**TOLD | told)
    horizon = recall.length // SEGMENT
    training = TrainingConfig(steps=steps, batch=BATCH, learning_rate=rate, warmup=WARMUP)
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
    return [round(float(np.mean(tenth)), 3) for tenth in np.array_split(losses, min(10, steps))]


def ask(answers: Callable[[Document], np.ndarray]) -> dict[str, float]:
    """The share of right answers of each test, by a function from documents (B, n) to tokens.

    Those of TOLD_AGAIN tell a fact again. There `overwrite` is the share of new values about its
    key, `old value` that of the value before, and `keep` the share of right answers about the other
    keys.
    """
    shares = {}
    for name, changes in TESTS.items():
        documents = documents_of(changes)
        found = answers(documents)
        shares[name] = share(found == documents.targets, documents.scored)

    for where, (distance, later) in TOLD_AGAIN.items():
        documents = asked_later(documents_of({"rewrites": 1, "distance": distance}), later)
        found = answers(documents)
        before, told_again = values_before(documents.inputs)
        again = documents.scored & told_again
        others = documents.scored & ~told_again
        shares[f"overwrite{where}"] = share(found == documents.targets, again)
        shares[f"old value{where}"] = share(found == before, again)
        shares[f"keep{where}"] = share(found == documents.targets, others)
    return shares


SIMPLEST = {  # what a score must be compared with: these know no key, and choose a told value
    "the value told most often": lambda values: np.bincount(values).argmax(),
    "the value told last": lambda values: values[-1],
}


def one_answer(choose: Callable[[np.ndarray], np.integer], documents: Document) -> np.ndarray:
    """(B, n) one of the values that a document told, for all of its questions."""
    answers = np.zeros_like(documents.inputs)
    for lane, row in enumerate(documents.inputs):
        told = row[np.flatnonzero(row == TELL) + 2]
        answers[lane] = choose(told)
    return answers


def share(is_right: np.ndarray, counted: np.ndarray) -> float:
    """The share of what is counted that is right."""
    return round(float(is_right[counted].mean()), 4)


def documents_of(changes: dict) -> Document:
    """The 64 documents of a test in one: its fields are (64, n)."""
    sizes: dict[str, Any] = ASKED | changes
    documents = list(RecallDocuments(RecallConfig(**sizes), "test"))
    names, *fields = zip(*documents, strict=True)
    return Document(", ".join(names), *map(np.stack, fields))


def asked_later(documents: Document, count: int) -> Document:
    """The same documents (64, n) with `count` tokens of filler before the first question."""
    lanes = len(documents.inputs)
    filler = np.random.default_rng(0).choice(FILLER, (lanes, count))
    places = np.full(count, documents.scored[0].argmax() - 1)
    return Document(
        documents.name,
        np.insert(documents.inputs, places, filler, 1),
        np.insert(documents.targets, places, 0, 1),
        np.insert(documents.scored, places, False, 1),
    )


def values_before(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(B, n) the value that was told first of each key, and whether it was told again."""
    first = np.zeros_like(inputs)
    again = np.zeros(inputs.shape, bool)
    for lane, row in enumerate(inputs):
        for place in np.flatnonzero(row == TELL)[::-1]:  # so that the first is the last to stand
            same = row == row[place + 1]
            again[lane, same] = first[lane, same] > 0
            first[lane, same] = row[place + 2]
    return first, again


@torch.no_grad()
def predictions(model: Model, documents: Document) -> np.ndarray:
    """(B, n) the most probable token after each of documents (B, n), 0 where none is scored."""
    lanes, length = documents.inputs.shape
    segments = -(-length // SEGMENT)
    tokens = np.zeros((lanes, segments * SEGMENT), np.int64)
    tokens[:, :length] = documents.inputs
    found = np.zeros_like(tokens)
    state = model.initial_state(lanes)
    with evaluating(model):
        for start in range(0, length, SEGMENT):
            part = slice(start, start + SEGMENT)
            segment = torch.from_numpy(tokens[:, part])
            if not documents.scored[:, part].any():
                state = model.advance(segment, state)  # costs less
                continue
            output = model(segment, state)
            state = output.state
            found[:, part] = output.logits.argmax(-1).numpy()
    return found[:, :length]


# The runs and their record


def new_record() -> dict:
    """A record without runs."""
    settings = {
        "smallest_difference": SMALLEST_DIFFERENCE,
        "segment": SEGMENT,
        "batch": BATCH,
        "told": TOLD,
        "stages": STAGES,
        "asked": ASKED,
        "tests": TESTS,
        "rows": {row: about(row) for row in ROWS},
    }
    return {
        "settings": json.loads(json.dumps(settings)),
        "tried": {},  # {row: {what: bits per answer}}, by hand; that of docs/results has ours
        "notes": "",  # what else the page must say of these runs, by hand
        **origin(),
        "runs": {row: {} for row in ROWS},  # {row: {seed: [what each stage taught]}}
    }


def about(row: str) -> dict:
    """What a row is."""
    name, changes, rate = ROWS[row]
    model = make_model(row, 0)
    return {
        "model": name,
        "config": SHARED | changes,
        "rate": rate,
        "parameters": count_parameters(model),
        "state_bytes": state_bytes(model),
    }


def record_at(path: Path) -> dict:
    """The record at path, or a new one; a row may have been added since it was begun.

    Raises InputError if its settings are others.
    """
    record = new_record()
    if not path.exists():
        return record
    found = read_record(path, {*record})
    settings = record["settings"]
    rows = settings["rows"] | found["settings"]["rows"]
    if found["settings"] | {"rows": rows} != settings:
        raise InputError(f"{path} has runs of other settings; give another --out")
    runs = record["runs"] | found["runs"]  # a row that is new has none yet
    return found | {"settings": settings, "runs": runs}


def run(row: str, seed: int, record: dict, path: Path, weights: Path) -> None:
    """Train and ask the stages of a run that the record lacks; write the record after each.

    Without the weights of its last stage a run begins anew.
    """
    stages = record["runs"][row].setdefault(str(seed), [])
    model = make_model(row, seed)
    name = f"{slug(row)}-{seed}"
    if 0 < len(stages) < len(STAGES):
        last = weights / f"{name}-{len(stages)}.safetensors"
        if last.exists():
            model.load_state_dict(load_file(last))
        else:
            stages.clear()
    for number, stage in list(enumerate(STAGES))[len(stages) :]:
        began = time.process_time()
        bits = [
            train(model, told, share * ROWS[row][2], steps, 100 * seed + 10 * number + part)
            for part, (told, steps, share) in enumerate(STAGES[stage])
        ]
        trained = time.process_time()
        answers = ask(partial(predictions, model))
        seconds = [round(trained - began), round(time.process_time() - trained)]
        stages.append({"stage": stage, "bits": bits, "right": answers, "seconds": seconds})
        kept = model.state_dict()
        keep(kept, weights / f"{name}-{number + 1}.safetensors")
        (weights / f"{name}-{number}.safetensors").unlink(missing_ok=True)
        if seed == 0:
            halves = {key: value.half() for key, value in kept.items()}
            keep(halves, weights / f"{slug(row)}-{slug(stage)}.safetensors", described(row, stage))
        record["date"] = origin()["date"]
        write_record(path, record, indent=1)
        print(f"{row}, seed {seed}, {stage}: {bits} {answers} {seconds} s", flush=True)


def keep(kept: dict, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write weights, and what their file says of them."""
    with written_whole(path) as temporary:
        save_file(kept, temporary, metadata)


def described(row: str, stage: str) -> dict[str, str]:
    """What the file of a stage's weights says: the row, its config, and the task's bytes.

    docs/book/try_one.py reads it, and the book offers each file that is copied to WEIGHTS.
    """
    name, changes, _ = ROWS[row]
    return {
        "row": row,
        "stage": stage,
        "model": name,
        "config": json.dumps(SHARED | changes),
        "alphabet": bytes(ALPHABET[: TOLD["pairs"] + TOLD["values"]]).decode(),
        "filler": bytes(FILLER).decode(),
        "tell": chr(TELL),
        "ask": chr(ASK),
    }


def print_answers(path: Path) -> None:
    """Ask the model whose weights path has, and print its shares of right answers.

    The file is one of docs/results/weights, which names its row. Raises InputError if it does not.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
        row = about.get("row")
        if row not in ROWS:
            raise InputError(f"{path} names no row of this experiment; give one of {WEIGHTS}")
        model = make_model(row, 0)
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(f"{path} has no weights of a row: {error}") from error
    print(f"{row}, after {about.get('stage')}: right answers in 64 documents of 16 questions")
    for test, right in ask(partial(predictions, model)).items():
        print(f"{test:20} {right:6.1%}")


def slug(words: str) -> str:
    """A name of a file."""
    return words.lower().replace(",", "").replace(" ", "-")


def main(argv: list[str]) -> None:
    """Train what the record lacks."""
    parser = parser_of("memory", __doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW")
    add("--seeds", nargs="+", type=int, default=HEADLINE_SEEDS, metavar="N")
    add("--out", type=Path, default=RESULTS, metavar="FOLDER")
    add("--weights", type=Path, default="runs/memory", metavar="FOLDER")
    add("--ask", type=Path, metavar="FILE", help="only ask trained weights")
    options = parser.parse(argv)
    if options.ask:
        print_answers(options.ask)
        return
    options.weights.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    path = options.out / "memory.json"
    with locked(path.with_suffix(".lock"), f"another process writes {path}; wait until it ends"):
        record = record_at(path)
        for seed, row in itertools.product(options.seeds, options.rows):
            run(row, seed, record, path, options.weights)


if __name__ == "__main__":
    run_command("memory", main)
