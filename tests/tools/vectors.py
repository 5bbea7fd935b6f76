"""Writes docs/vectors from the references, for those who port a method (docs/porting.md).

    python -m tests.tools.vectors

A case is one config, its parameters, a rollout of three segments and all that a port should compute
from them. Its numbers are drawn from its name. rules.json holds what needs no arithmetic: masks,
distances, buckets, windows, schedules, a task's documents.
"""

import dataclasses
import json
import re
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from accelerated.data.recall import RecallConfig, recall_document
from accelerated.data.windows import cut
from accelerated.training.optimization import learning_rate
from accelerated.training.settings import TrainingConfig
from reference import block_recurrent, compressive, memformer, pretrained_recurrence
from reference.check import GIVEN, INNER
from reference.rollout import (
    ADAMW,
    SGD_RATE,
    Segment,
    adamw,
    named,
    rollout_backward,
    rollout_forward,
    sgd,
)
from tests.helpers.rollouts import reference_rollout
from tests.helpers.variants import PAPERS, shaken
from tests.models.memformer import random_task
from tests.tools.cases import EVERY_CASE, MEMFORMER, TASKS, config_of, inner_values

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"
LANES = 3
SEGMENTS = 3
STEPS = 3  # STEPS of AdamW
STARTS = (2, 1, -1)  # the lane that starts a document, by segment
BITS = 2**10  # given numbers are multiples of 1 / BITS, which float32 holds exactly


def on_grid(array: np.ndarray) -> np.ndarray:
    """A float array rounded to multiples of 1 / BITS; others as they are."""
    return np.round(array * BITS) / BITS if array.dtype.kind == "f" else array


def segments_of(paper: str, name: str, config: object, rng: np.random.Generator) -> list[Segment]:
    """Three segments; lane 2 starts a document at the first, the middle lane at the second.

    Lane 2 ends with padding.
    """
    overlap = getattr(config, "overlap", 0)
    tasks = TASKS.get(name) if paper == "memformer" else None
    segments = []
    for k in range(SEGMENTS):
        length = config.segment - (PAPERS[paper].shorter if k == SEGMENTS - 1 else 0)
        tokens, targets = rng.integers(config.vocabulary, size=(2, LANES, length))
        scored = rng.random(tokens.shape) < 0.8
        starts = np.arange(LANES) == STARTS[k]
        if k and overlap:  # as windows overlap: read again, not scored again
            carried = ~starts
            tokens[carried, :overlap] = segments[-1].tokens[carried, -overlap:]
            targets[carried, :overlap] = segments[-1].targets[carried, -overlap:]
            scored[carried, :overlap] = False
        if k == SEGMENTS - 1:
            scored[2, -2:] = False
        task = random_task(config, rng, tasks[k - 1]) if k and tasks else None
        segments.append(Segment(tokens, targets, scored, starts, task))
    return segments


def given_of(params: dict, state: tuple, segments: list) -> dict:
    """{name: array} of what a port is given."""
    given = {f"param/{name}": value for name, value in params.items()} | named("state/", state)
    for k, segment in enumerate(segments):
        for name, array in segment._asdict().items():
            if name != "task":
                given[f"{k}/{name}"] = array
        if segment.task:
            given |= named(f"{k}/task.", segment.task)
    return {GIVEN + name: array for name, array in given.items()}


def inputs_of(paper: str, name: str) -> tuple[dict, tuple, list]:
    """(parameters, state before the first segment, segments) of a case."""
    config = config_of(paper, name)
    rng = np.random.default_rng(zlib.crc32(f"{paper}/{name}".encode()))
    params = PAPERS[paper].reference.init_params(config, rng)
    params = {n: on_grid(value) for n, value in shaken(params, rng).items()}
    state = PAPERS[paper].random_state(config, rng, LANES)
    return params, type(state)(*map(on_grid, state)), segments_of(paper, name, config, rng)


def part_of(values: dict, path: str) -> object:
    """What a path names, None if it is missing.

    "projected.query" is values["projected"]["query"], "return.0" the first of a tuple.
    """
    value = values
    for part in path.split("."):
        if value is None:
            return None
        value = value.get(part) if isinstance(value, dict) else value[int(part)]
    return value


def keep(found: dict, specifications: list, calls: str, values: dict) -> None:
    """Add a copy of what is named for the last of these calls and was not found before."""
    for functions, names in specifications:
        patterns = [re.escape(name) if "[" in name else rf"{name}\[\d+\]" for name in functions]
        pattern = "/(?:.*/)?".join(patterns)
        if not re.search(f"/{pattern}$", calls):
            continue
        for local, name in names.items():
            value = part_of(values, local)
            if value is not None and name not in found:
                # -inf is the score of a hidden key
                found[name] = np.where(np.isfinite(value), value, 0)


def recorded(specifications: list, reference: object, *arguments: object) -> dict:
    """{name: array} of what specifications name, while a reference runs rollout_forward.

    The values are those of its functions when they return.
    """
    stack = [("", Counter())]
    found = {}  # of calls, "/forward[0]/layer_forward[1]", with the number of calls inside each

    def profile(frame, event, result):
        code = frame.f_code
        (calls, inside) = stack[-1]
        if code.co_filename != reference.__file__ or code.co_name.startswith("<"):
            return
        if event == "call":
            stack.append((f"{calls}/{code.co_name}[{inside[code.co_name]}]", Counter()))
            inside[code.co_name] += 1
        elif event == "return":
            keep(found, specifications, calls, frame.f_locals | {"return": result})
            stack.pop()

    sys.setprofile(profile)
    try:
        rollout_forward(reference, *arguments)
    finally:
        sys.setprofile(None)
    return found


def hidden_of(paper: str, config: object) -> dict:
    """{value inside a layer: mask of the query-key pairs that count}.

    Where it hides a key, 0 is written.
    """
    if paper in ("block_recurrent", "memorizing"):
        window = config.window if paper == "block_recurrent" else config.segment
        mask = block_recurrent.tile_mask(window)
        return {"position_bias": mask, "similarity": mask}
    if paper == "compressive":
        keys = config.compressed_memory + config.memory + config.segment
        mask = compressive.causal_mask(config.segment, keys)
        return {"scores_by_distance_shifted": mask, "scores": mask}
    return {}


def inner_of(
    paper: str, name: str, reference: object, params: dict, state: tuple, segments: list
) -> dict:
    """{name: array} of values inside a layer while the first segment is read.

    They are in the order of computation.
    """
    listed = inner_values(paper, name)
    config = config_of(paper, name)
    found = recorded(listed, reference, params, config, segments[:1], state)
    if "decoded" in found:
        found["decoded"] = found["decoded"].reshape(found["evicted"].shape)
    for each, mask in hidden_of(paper, config).items():
        if each in found:
            found[each] = np.where(mask, found[each], 0)
    order = dict.fromkeys(name for _, names in listed for name in names.values())
    return {INNER + name: found[name] for name in order if name in found}


def steps_of(reference: object, config: object, params: dict, state: tuple, segments: list) -> dict:
    """{name: array} of the parameters after a step of gradient descent, and after three of AdamW.

    All steps read the same segments.
    """
    once = {}
    after = params
    moments = {}
    for step in range(1, STEPS + 1):
        _, caches, _ = rollout_forward(reference, after, config, segments, state)
        grads, _ = rollout_backward(reference, after, config, caches)
        once = once or sgd(params, grads)
        after, moments = adamw(after, grads, moments, step)
    rows = {f"sgd/{name}": value for name, value in once.items()}
    return rows | {f"adamw/{name}": value for name, value in after.items()}


def computed(paper: str, name: str, reference: object, steps: bool = True) -> dict:
    """{name: array} of all that a port should compute, by this reference.

    Steps of optimisers are left out if not asked for.
    """
    config = reference.Config(**dataclasses.asdict(config_of(paper, name)))
    params, state, segments = inputs_of(paper, name)
    rows = inner_of(paper, name, reference, params, state, segments)
    rows |= reference_rollout(reference, params, config, segments, state)
    for field, value in state._asdict().items():
        if value.dtype.kind != "f":  # tokens have no gradient
            rows.pop(f"grad_state/{field}", None)
    if steps:
        rows |= steps_of(reference, config, params, state, segments)
    return rows


def case_file(paper: str, name: str) -> tuple[dict, dict]:
    """({name: array}, metadata) of a case."""
    reference = PAPERS[paper].reference
    config = config_of(paper, name)
    rows = given_of(*inputs_of(paper, name)) | computed(paper, name, reference)
    # What is empty stands in no file
    rows = {key: np.array(row, order="C") for key, row in rows.items() if row.size}
    metadata = {
        "paper": paper,
        "case": name,
        "config": json.dumps(dataclasses.asdict(config)),
        "inner": json.dumps([key for key in rows if key.startswith(INNER)]),
        "steps": json.dumps({"sgd": {"rate": SGD_RATE}, "adamw": ADAMW}),
    }
    return rows, metadata


def rows_of(mask: np.ndarray) -> list[str]:
    """A mask (N, K) as a text of 0 and 1 for each query; 1 is a key that it sees."""
    return ["".join(str(int(sees)) for sees in row) for row in mask]


def distance_rule(config: memformer.Config, causal: bool) -> dict:
    """Memformer's signed distances."""
    tokens = 6
    distances = config.distances(causal)
    rule = {
        "tokens": tokens,
        "causal": causal,
        "max_distance": config.max_distance,
        "decoder only": config.encoder_layers == 0,
    }
    index = memformer.distance_index(tokens, distances).tolist()
    return rule | {
        "distance of a row": distances.tolist(),
        "row that a query and a key take": index,
    }


def schedule(name: str, **fields: float) -> dict:
    """A learning-rate schedule and its rate at some steps."""
    fields = {"schedule": name} | fields | {"learning_rate": 0.01, "warmup": 10, "steps": 100}
    config = TrainingConfig(**fields)
    steps = (1, 2, 5, 10, 11, 25, 50, 99, 100)
    return fields | {
        "initial_fraction": config.initial_fraction,
        "rate at step": {t: learning_rate(t, config) for t in steps},
    }


def rules() -> dict:
    """What rules.json holds: masks, distances and buckets by paper, schedules, recall."""
    schedules = [
        schedule("cosine", final_fraction=0.1),
        schedule("constant"),
        schedule("inverse_square_root"),
    ]
    return {
        "block_recurrent": block_recurrent_rules(),
        "compressive": compressive_rules(),
        "memformer": memformer_rules(),
        "pretrained_recurrence": pretrained_recurrence_rules(),
        "schedules": schedules,
        "recall task": recall_rules(),
    }


def block_recurrent_rules() -> dict:
    """The mask and the distances of a tile, and the buckets that distances take."""
    window = 4
    mask = rows_of(block_recurrent.tile_mask(window))
    distance = block_recurrent.tile_distance(window).tolist()
    buckets = []
    for count, most in ((32, 128), (6, 5), (4, 6)):
        taken = block_recurrent.position_bucket(np.arange(200), count, most).tolist()
        buckets.append({"buckets": count, "max_distance": most, "of distances from 0": taken})
    return {
        "mask": {"window": window, "queries by keys of a tile": mask},
        "distance": {"window": window, "of a query and a key of its tile": distance},
        "buckets": buckets,
    }


def compressive_rules() -> dict:
    """The mask, and which distance a query and a key have."""
    queries = 4
    keys = 9
    shift = np.arange(keys)[None, :] + queries - 1 - np.arange(queries)[:, None]
    rows = np.where(shift < keys, shift, -1).tolist()
    sizes = {"queries": queries, "keys": keys}
    mask = rows_of(compressive.causal_mask(queries, keys))
    shifted = {
        "row of the distances that a query and a key take; -1 is hidden": rows,
        "distance of a row": list(range(keys - 1, -1, -1)),
    }
    return {"mask": sizes | {"queries by keys": mask}, "relative shift": sizes | shifted}


def memformer_rules() -> dict:
    """The special tokens, and the signed distances of both models."""
    specials = {name: MEMFORMER.special(name) for name in memformer.SPECIALS}
    distances = []
    for name in ("decoder-only", "continuation"):
        for causal in (False, True):
            distances.append(distance_rule(config_of("memformer", name), causal))
    return {"special tokens": specials, "distances": distances}


def pretrained_recurrence_rules() -> dict:
    """The mask, how documents are cut into windows, and which positions of one are pooled."""
    present = [True, False]
    masks = pretrained_recurrence.window_mask(3, 2, np.array(present))
    by_lane = [rows_of(mask[0]) for mask in masks]
    windows = []
    cuts = ((1, 4, 0), (5, 4, 0), (12, 4, 0), (12, 4, 1), (13, 6, 4), (3, 6, 2))
    for tokens, window, overlap in cuts:
        found = [list(each) for each in cut(tokens, window, overlap)]
        sizes = {"tokens": tokens, "window": window, "overlap": overlap}
        windows.append(sizes | {"[start, stop, first scored]": found})
    return {
        "mask": {"a window came before, by lane": present, "vectors": 2, "by lane": by_lane},
        "windows": windows,
        "pooled positions": pooling_rules(),
    }


def pooling_rules() -> list[dict]:
    """How many positions are pooled of whole windows and of shorter ones."""
    rules = []
    for pool in pretrained_recurrence.POOLS:
        config = pretrained_recurrence.Config(segment=6, overlap=2, pool=pool)
        for tokens in (6, 4, 2, 1):
            pooled = pretrained_recurrence.pooled_rows(config, tokens)
            rule = {"window": 6, "overlap": 2, "pool": pool, "tokens": tokens, "pooled": pooled}
            rules.append(rule)
    return rules


def recall_rules() -> dict:
    """Two documents of the recall task."""
    config = RecallConfig(pairs=3, questions=4, distance=6)
    documents = []
    for number in range(2):
        rng = np.random.default_rng([0, 0, number])
        document = recall_document(config, rng, str(number))
        shown = {
            "inputs": bytes(document.inputs).decode(),
            "targets": document.targets.tolist(),
            "scored": document.scored.astype(int).tolist(),
        }
        documents.append(shown)
    return {"config": dataclasses.asdict(config), "documents": documents}


def main() -> None:
    """Write docs/vectors."""
    for paper, name in EVERY_CASE:
        (FOLDER / paper).mkdir(parents=True, exist_ok=True)
        rows, metadata = case_file(paper, name)
        save_file(rows, FOLDER / paper / f"{name}.safetensors", metadata)
    text = json.dumps(rules(), indent=1)
    # A list of numbers in one line
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    (FOLDER / "rules.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
