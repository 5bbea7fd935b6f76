"""python -m tests.tools.vectors: writes docs/vectors from the references, for those who port a method (docs/porting.md).

A case is one config, its parameters, a rollout of three segments and all that a port should compute from them. Its numbers are
drawn from its name. rules.json holds what needs no arithmetic: masks, distances, buckets, windows, schedules, a task's documents.
"""

import dataclasses
import json
import re
import sys
import time
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from accelerated.data.recall import RecallConfig, recall_document
from accelerated.data.windows import cut
from accelerated.training.optimization import learning_rate
from accelerated.training.settings import TrainingConfig
from reference import block_recurrent, compressive, memformer, pretrained_recurrence
from reference.check import GIVEN, INNER
from reference.rollout import ADAMW, SGD_RATE, Segment, adamw, named, rollout_backward, rollout_forward, sgd
from tests.helpers.variants import PAPERS, random_task, shaken
from tests.tools.cases import CASES, EVERY_CASE, INNER_VALUES, MEMFORMER, Case

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"
LANES, SEGMENTS, STEPS = 3, 3, 3  # STEPS of AdamW
STARTS = (2, 1, -1)  # the lane that starts a document, by segment
BITS = 2**10  # given numbers are multiples of 1 / BITS, which float32 holds exactly


def on_grid(array: np.ndarray) -> np.ndarray:
    """A float array rounded to multiples of 1 / BITS; others as they are."""
    return np.round(array * BITS) / BITS if array.dtype.kind == "f" else array


def generator(paper: str, case: str) -> np.random.Generator:
    """The random numbers of a case."""
    return np.random.default_rng(zlib.crc32(f"{paper}/{case}".encode()))


def segments_of(paper: str, case: Case, rng: np.random.Generator) -> list[Segment]:
    """Three segments; lane 2 starts a document at the first, the middle lane at the second; lane 2 ends with padding."""
    config, overlap, segments = case.config, getattr(case.config, "overlap", 0), []
    for k in range(SEGMENTS):
        length = config.segment - (PAPERS[paper].shorter if k == SEGMENTS - 1 else 0)
        tokens, targets = rng.integers(config.vocabulary, size=(2, LANES, length))
        scored, starts = rng.random(tokens.shape) < 0.8, np.arange(LANES) == STARTS[k]
        if k and overlap:  # as windows overlap: read again, not scored again
            carried = ~starts
            tokens[carried, :overlap] = segments[-1].tokens[carried, -overlap:]
            targets[carried, :overlap] = segments[-1].targets[carried, -overlap:]
            scored[carried, :overlap] = False
        if k == SEGMENTS - 1:
            scored[2, -2:] = False
        task = random_task(config, rng, case.tasks[k - 1]) if k and case.tasks else None
        segments.append(Segment(tokens, targets, scored, starts, task))
    return segments


def given_of(params: dict, state: tuple, segments: list) -> dict:
    """{name: array} of what a port is given."""
    given = {f"param/{name}": value for name, value in params.items()} | named("state/", state)
    for k, segment in enumerate(segments):
        given |= {f"{k}/{name}": array for name, array in segment._asdict().items() if name != "task"}
        given |= named(f"{k}/task.", segment.task) if segment.task else {}
    return {GIVEN + name: array for name, array in given.items()}


def inputs_of(paper: str, name: str) -> tuple[dict, tuple, list]:
    """(parameters, state before the first segment, segments) of a case."""
    case, rng = CASES[paper][name], generator(paper, name)
    reference = PAPERS[paper].reference
    params = {n: on_grid(value) for n, value in shaken(reference.init_params(case.config, rng), rng).items()}
    state = PAPERS[paper].random_state(case.config, rng, LANES)
    return params, type(state)(*map(on_grid, state)), segments_of(paper, case, rng)


def part_of(values: dict, path: str) -> object:
    """What a path names: "projected.query" is values["projected"]["query"], "return.0" the first of a tuple; None if missing."""
    value = values
    for part in path.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif value is not None:
            value = value[int(part)]
    return value


class Recorder:
    """Inside the block, keeps a copy of what specifications name, as the functions of one file return."""

    def __init__(self, file: str, specifications: list):
        self.file, self.specifications = file, specifications
        self.stack, self.found = [("", {})], {}

    def __call__(self, frame, event, result):
        """What sys.setprofile calls."""
        code = frame.f_code
        if code.co_filename != self.file or code.co_name.startswith("<"):
            return
        if event == "call":
            calls = self.stack[-1][1]
            number = calls[code.co_name] = calls.get(code.co_name, -1) + 1
            self.stack.append((f"{code.co_name}[{number}]", {}))
        elif event == "return":
            self.keep([name for name, _ in self.stack], frame.f_locals | {"return": result})
            self.stack.pop()

    def keep(self, path: list, values: dict):
        """Keep what is named for this call and was not found before."""
        for functions, names in self.specifications:
            remaining = iter(path)
            calls = all(any(part in (call, call.partition("[")[0]) for call in remaining) for part in functions)
            if calls and functions[-1] in (path[-1], path[-1].partition("[")[0]):
                for local, name in names.items():
                    value = part_of(values, local)
                    if name not in self.found and value is not None:
                        self.found[name] = np.where(np.isfinite(value), value, 0)  # -inf is the score of a hidden key

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)


def hidden_of(paper: str, config: object) -> dict:
    """{value inside a layer: mask of the query-key pairs that count}; where it hides a key, 0 is written."""
    if paper in ("block_recurrent", "memorizing"):
        window = config.window if paper == "block_recurrent" else config.segment
        return dict.fromkeys(("position_bias", "similarity"), block_recurrent.tile_mask(window))
    if paper == "compressive":
        keys = config.compressed_memory + config.memory + config.segment
        return dict.fromkeys(("scores_by_distance_shifted", "scores"), compressive.causal_mask(config.segment, keys))
    return {}


def inner_of(paper: str, name: str, reference: object, params: dict, state: tuple, segments: list) -> dict:
    """{name: array} of values inside a layer while the first segment is read, in the order of computation."""
    listed = [entry for entries, cases in INNER_VALUES[paper] if cases is None or name in cases for entry in entries]
    with Recorder(reference.__file__, listed) as recorder:
        rollout_forward(reference, params, CASES[paper][name].config, segments[:1], state)
    found = recorder.found
    if "decoded" in found:
        found["decoded"] = found["decoded"].reshape(found["evicted"].shape)
    for each, mask in hidden_of(paper, CASES[paper][name].config).items():
        if each in found:
            found[each] = np.where(mask, found[each], 0)
    order = dict.fromkeys(name for _, names in listed for name in names.values())
    return {INNER + name: found[name] for name in order if name in found}


def steps_of(reference: object, config: object, params: dict, state: tuple, segments: list) -> dict:
    """{name: array} of the parameters after a step of gradient descent, and after three of AdamW on the same segments."""
    grads, after, moments = {}, params, {}
    rows = {}
    for step in range(1, STEPS + 1):
        grads, _ = rollout_backward(reference, after, config, rollout_forward(reference, after, config, segments, state)[1])
        if step == 1:
            rows = {f"sgd/{name}": value for name, value in sgd(params, grads).items()}
        after, moments = adamw(after, grads, moments, step)
    return rows | {f"adamw/{name}": value for name, value in after.items()}


def computed(paper: str, name: str, reference: object, steps: bool = True) -> dict:
    """{name: array} of all that a port should compute, by this reference; steps of optimisers are left out if not asked for."""
    config = reference.Config(**dataclasses.asdict(CASES[paper][name].config))
    params, state, segments = inputs_of(paper, name)
    rows, caches, _ = rollout_forward(reference, params, config, segments, state)
    grads, dstate = rollout_backward(reference, params, config, caches)
    rows = inner_of(paper, name, reference, params, state, segments) | rows
    rows |= {f"grad/{n}": value for n, value in grads.items()}
    rows |= {f"grad_state/{field}": value for field, value in dstate._asdict().items() if getattr(state, field).dtype.kind == "f"}
    return rows | (steps_of(reference, config, params, state, segments) if steps else {})


def case_file(paper: str, name: str) -> tuple[dict, dict]:
    """({name: array}, metadata) of a case."""
    reference, config = PAPERS[paper].reference, CASES[paper][name].config
    rows = given_of(*inputs_of(paper, name)) | computed(paper, name, reference)
    rows = {n: np.array(row, order="C") for n, row in rows.items() if row.size}  # what is empty stands in no file
    inner = [n for n in rows if n.startswith(INNER)]
    steps = {"sgd": {"rate": SGD_RATE}, "adamw": ADAMW}
    parts = {"config": dataclasses.asdict(config), "inner": inner, "steps": steps}
    return rows, {"paper": paper, "case": name} | {key: json.dumps(part) for key, part in parts.items()}


def mask_rows(mask: np.ndarray) -> list[str]:
    """A mask (N, K) as a text of 0 and 1 for each query; 1 is a key that it sees."""
    return ["".join(str(int(sees)) for sees in row) for row in mask]


def rules_of_attention() -> dict:
    """Masks, distances and buckets, by paper."""
    w, (n, k), length = 4, (4, 9), 6
    shift = np.arange(k)[None, :] + n - 1 - np.arange(n)[:, None]
    small = CASES["memformer"]["decoder-only"].config, CASES["memformer"]["continuation"].config
    windows = pretrained_recurrence.window_mask(3, 2, np.array([True, False]))
    return {
        "block_recurrent": {
            "mask": {"window": w, "queries by keys of a tile": mask_rows(block_recurrent.tile_mask(w))},
            "distance": {"window": w, "of a query and a key of its tile": block_recurrent.tile_distance(w).tolist()},
            "buckets": [
                {
                    "buckets": buckets,
                    "max_distance": longest,
                    "of distances from 0": block_recurrent.position_bucket(np.arange(200), buckets, longest).tolist(),
                }
                for buckets, longest in ((32, 128), (6, 5), (4, 6))
            ],
        },
        "compressive": {
            "mask": {"queries": n, "keys": k, "queries by keys": mask_rows(compressive.causal_mask(n, k))},
            "relative shift": {
                "queries": n,
                "keys": k,
                "row of the distances that a query and a key take; -1 is hidden": np.where(shift < k, shift, -1).tolist(),
                "distance of a row": list(range(k - 1, -1, -1)),
            },
        },
        "memformer": {
            "special tokens": {name: MEMFORMER.special(name) for name in memformer.SPECIALS},
            "distances": [
                {
                    "tokens": length,
                    "causal": causal,
                    "max_distance": config.max_distance,
                    "decoder only": config.encoder_layers == 0,
                    "distance of a row": config.distances(causal).tolist(),
                    "row that a query and a key take": memformer.distance_index(length, config.distances(causal)).tolist(),
                }
                for config in small
                for causal in (False, True)
            ],
        },
        "pretrained_recurrence": {
            "mask": {"a window came before, by lane": [True, False], "vectors": 2, "by lane": [mask_rows(m[0]) for m in windows]},
            "windows": [
                {"tokens": tokens, "window": t, "overlap": o, "[start, stop, first scored]": [*map(list, cut(tokens, t, o))]}
                for tokens, t, o in ((1, 4, 0), (5, 4, 0), (12, 4, 0), (12, 4, 1), (13, 6, 4), (3, 6, 2))
            ],
            "pooled positions": [
                {"window": 6, "overlap": 2, "pool": pool, "tokens": n, "pooled": pretrained_recurrence.pooled_rows(config, n)}
                for pool in pretrained_recurrence.POOLS
                for config in [pretrained_recurrence.Config(segment=6, overlap=2, pool=pool)]
                for n in (6, 4, 2, 1)
            ],
        },
    }


def schedule(**fields) -> dict:
    """A learning-rate schedule and its rate at some steps."""
    config, steps = TrainingConfig(**fields), (1, 2, 5, 10, 11, 25, 50, 99, 100)
    return fields | {"initial_fraction": config.initial_fraction, "rate at step": {t: learning_rate(t, config) for t in steps}}


def rules() -> dict:
    """What rules.json holds."""
    recall = RecallConfig(pairs=3, questions=4, distance=6)
    documents = [recall_document(recall, np.random.default_rng([0, 0, number]), str(number)) for number in range(2)]
    common = {"learning_rate": 0.01, "warmup": 10, "steps": 100}
    return rules_of_attention() | {
        "schedules": [
            schedule(schedule="cosine", final_fraction=0.1, **common),
            schedule(schedule="constant", **common),
            schedule(schedule="inverse_square_root", **common),
        ],
        "recall task": {
            "config": dataclasses.asdict(recall),
            "documents": [
                {"inputs": bytes(d.inputs).decode(), "targets": d.targets.tolist(), "scored": d.scored.astype(int).tolist()}
                for d in documents
            ],
        },
    }


def write(folder: Path) -> int:
    """Write all files; returns their size in bytes."""
    for paper, name in EVERY_CASE:
        path = folder / paper / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows, metadata = case_file(paper, name)
        save_file(rows, path, metadata)
    text = json.dumps(rules(), indent=1)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)  # a list of numbers in one line
    (folder / "rules.json").write_text(text + "\n")
    return sum(path.stat().st_size for path in folder.rglob("*.*"))


def main() -> None:
    """Write docs/vectors and say how much it is."""
    began = time.perf_counter()
    print(f"{len(EVERY_CASE)} cases, {write(FOLDER):,} bytes in {FOLDER}, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
