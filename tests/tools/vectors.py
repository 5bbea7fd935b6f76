"""Writes docs/vectors from the references, for those who port a method (docs/porting.md).

    python -m tests.tools.vectors

A case is one config, its parameters, a rollout of three segments and all that a port should compute
from them. Its numbers are drawn from its name. rules.json holds what needs no arithmetic: masks,
distances, buckets, windows, schedules, a task's documents.
"""

import dataclasses
import json
import re
import zlib
from pathlib import Path

import numpy as np

from accelerated.data.recall import RecallConfig, recall_document
from accelerated.data.windows import cut
from accelerated.training.optimization import learning_rate
from accelerated.training.settings import TrainingConfig
from reference import block_recurrent, compressive, memformer, pretrained_recurrence, vectors
from reference.gradients import Case
from reference.rollout import rollout_backward, rollout_forward
from reference.variants import memformer as memformer_variants
from reference.variants import pretrained_recurrence as pooling
from tests.helpers.optimizers import ADAMW, SGD_RATE, adamw, sgd
from tests.helpers.variants import PAPERS
from tests.models.memformer import random_task
from tests.tools import inner
from tests.tools.cases import CONFIGS, EVERY_CASE, STEPPED, TASKS, VARIANTS, config_of
from tests.tools.operators import operators

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"
CATALOGUE = FOLDER.parent / "ports" / "mistakes.json"
STEPS = 3  # of AdamW


def inputs_of(paper: str, name: str) -> Case:
    """What a port is given in a case."""
    rng = np.random.default_rng(zlib.crc32(f"{paper}/{name}".encode()))
    config = config_of(paper, name)
    tasks = TASKS.get((paper, name), ())

    def task_of(k: int) -> memformer_variants.Task | None:
        return random_task(config, rng, tasks[k]) if tasks and tasks[k] else None

    return vectors.random_case(PAPERS[paper].reference, config, rng, task_of)


def steps_of(case: Case) -> dict:
    """{name: array} of the parameters after a step of gradient descent, and after three of AdamW.

    All steps read the same segments.
    """
    reference, config, params, state, segments = case
    once: dict = {}
    after = params
    moments: dict = {}
    for step in range(1, STEPS + 1):
        _, caches, _ = rollout_forward(reference, after, config, segments, state)
        grads, _ = rollout_backward(reference, after, config, caches)
        once = once or sgd(params, grads)
        after, moments = adamw(after, grads, moments, step)
    rows = {f"sgd/{name}": value for name, value in once.items()}
    return rows | {f"adamw/{name}": value for name, value in after.items()}


def computed(
    paper: str, name: str, reference: object, steps: bool = True, backwards: bool = True
) -> dict:
    """{name: array} of all that a port should compute, by this reference.

    Steps of optimisers and gradients are left out if not asked for.
    """
    config = reference.Config(**dataclasses.asdict(config_of(paper, name)))
    case = inputs_of(paper, name)._replace(reference=reference, config=config)
    rows = inner.rows_of(case, name, backwards)
    if (paper, name) == ("memformer", "recall"):  # how often replay calls what
        count = len(case.segments)
        rows |= {"replay/advance": np.array(count - 1), "replay/forward": np.array(count)}
    return rows | steps_of(case) if steps and name in STEPPED else rows


def case_file(paper: str, name: str) -> tuple[dict, dict]:
    """({name: array}, what stands beside them) of a case."""
    case = inputs_of(paper, name)
    rows = vectors.given_of(case) | computed(paper, name, case.reference)
    about = vectors.about(paper, name, case.config)
    about["steps"] = {"sgd": {"rate": SGD_RATE}, "adamw": ADAMW}
    return rows, about | {"flags": flags_of(paper, name)}


def operators_case(paper: str, name: str) -> Case:
    """A case whose functions are called; Memformer's has tasks, whose masks have every lane."""
    case = inputs_of(paper, name)
    if (paper, name) != ("memformer", "continuation"):
        return case
    rng = np.random.default_rng(0)
    continuation = random_task(case.config, rng, (0,) * vectors.LANES)
    return case._replace(segments=[each._replace(task=continuation) for each in case.segments])


def operators_file(paper: str) -> tuple[dict, dict]:
    """({name: array}, what stands beside them) of a paper's operators."""
    rows = operators(paper, lambda name: operators_case(paper, name))
    return rows, vectors.about(paper, "operators", config_of(paper, next(iter(VARIANTS[paper]))))


def flags_of(paper: str, name: str) -> dict:
    """{first wrong tensor: {flag: how wrong}} of the catalogue's mistakes that a case catches."""
    flags: dict = {}
    for mistake in json.loads(CATALOGUE.read_text()):
        if mistake["paper"] == paper and name in mistake["cases"]:
            tensor, mark = mistake["cases"][name]
            flags.setdefault(tensor, {})[mistake["flag"]] = mark
    return flags


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
    specials = {name: CONFIGS["memformer"].special(name) for name in memformer.SPECIALS}
    distances = []
    for name in ("decoder-only", "continuation"):
        for causal in (False, True):
            distances.append(distance_rule(config_of("memformer", name), causal))
    return {"special tokens": specials, "distances": distances, "tasks": task_rules()}


class Draws:
    """A generator that keeps what it draws."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.lengths: list = []
        self.places: list = []

    def poisson(self, mean: float) -> int:
        """The length of a span."""
        self.lengths.append(int(self.rng.poisson(mean)))
        return self.lengths[-1]

    def permutation(self, count: int) -> np.ndarray:
        """Places, of which the first ones are masked."""
        self.places = self.rng.permutation(count).tolist()
        return np.array(self.places)


def task_rules() -> dict:
    """What the tasks read and predict of three segments, and how spans are masked."""
    first, second, third = ([10 * k + token for token in range(10)] for k in (1, 2, 3))
    spans = []
    for seed in range(3):
        draws = Draws(seed)
        mask = -1
        reading, masked = memformer_variants.mask_spans(np.array(second), mask, 0.3, 2.0, draws)
        span = {"fraction": 0.3, "mean": 2.0, "lengths drawn": draws.lengths}
        span |= {"places drawn": draws.places, "reading, -1 is mask": reading.tolist()}
        spans.append(span | {"predicts": np.array(second)[masked].tolist()})
    return {
        "segments": [first, second, third],
        "of the third": {
            "continuation": {"reading": second, "prompt": third, "predicts": third[1:]},
            "infilling": {"prompt": second, "spans": spans},
            "recall": {"reading": second, "prompt": first, "predicts": first},
        },
    }


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
    for pool in pooling.POOLS:
        config = pretrained_recurrence.Config(segment=6, overlap=2, pool=pool)
        for tokens in (6, 4, 2, 1):
            pooled = pooling.pooled_rows(config, tokens)
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
        vectors.write(FOLDER / paper / f"{name}.safetensors", *case_file(paper, name))
    (FOLDER / "operators").mkdir(exist_ok=True)
    for paper in VARIANTS:
        path = FOLDER / "operators" / f"{paper}.safetensors"
        vectors.write(path, *operators_file(paper))
    text = json.dumps(rules(), indent=1)
    # A list of numbers in one line
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    (FOLDER / "rules.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
