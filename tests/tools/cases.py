"""The cases of the conformance vectors, which cases.txt lists: vectors.py writes them, tests check
them.
"""

import dataclasses
import importlib
from pathlib import Path

from reference.gradients import fields_of

CONFIGS = {}  # {paper: the config that its cases change}
VARIANTS = {}  # {paper: {case: the fields of its config that it changes}}
TASKS = {}  # {(paper, case): the tasks of every lane in each segment, or none}
sizes = {}  # {name in capitals: fields that cases share}
for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
    if not line or line[0] == "#":
        continue
    head, brace, rest = line.partition("{")
    fields = fields_of(brace + rest or "{}")
    first, *names = head.split()
    if first == "==":
        [paper] = names
        CONFIGS[paper] = importlib.import_module(f"reference.{paper}").Config(**fields)
        VARIANTS[paper] = {}
    elif first.isupper():
        sizes[first] = fields
    else:
        changed: dict = {}
        for name in names:
            if "/" in name:
                TASKS[paper, first] = [[*map(int, of_lanes)] for of_lanes in name.split("/")]
            else:
                changed |= sizes[name]
        VARIANTS[paper][first] = changed | fields

EVERY_CASE = [(paper, name) for paper, variants in VARIANTS.items() for name in variants]
# The cases with steps of optimisers, which are the same for all
STEPPED = ("slide", "conv-bptt", "recall", "retrieval", "mean")


def config_of(paper, name):
    """The config of a case."""
    return dataclasses.replace(CONFIGS[paper], **VARIANTS[paper][name])
