"""Which loss trains what: every loss against every group of parameters, by the reference.

tests/test_contract.py holds the accelerated models' gradients to these: what is exactly zero here
is exactly zero there.
"""

import numpy as np

from tests.helpers.rollouts import both_sides
from tests.helpers.variants import PAPERS, over, pairs
from tests.tools.reach import ALL, GROUPS, PART, ZERO, expected_cells, group_of

TASKS = ("own", "infilling", "recall")
PAIRS = pairs(  # variants that differ in what trains what
    block_recurrent="""
        fixed-dual lstm-skip fixed-single-feedback two-recurrent last-recurrent slide xl-recurrent
        one-layer-feedback
    """,
    compressive="""
        conv-none conv-attention_reconstruction conv-auto_encoding conv-bptt dilated_conv-bptt
        most_used-bptt transformer-xl short-memory short-memory-bptt nothing-remembered
        adaptive-conv-bptt simplified-attention_reconstruction one-layer
    """,
    memformer="encoder-decoder encoder-decoder-xl decoder-only one-token one-slot",
    memorizing="ten-of-thirteen first-layer last-layer one-layer transformer-xl",
    pretrained_recurrence="""
        overlapping plain max fixed-key pooled-after-the-norm linear-module one-token
        one-layer-one-head
    """,
)


def reached(grads):
    """The names whose gradient is not exactly zero."""
    return {name for name, grad in grads.items() if np.any(grad)}


def by_the_reference(paper, params, config, tokens, first, state, task):
    """{loss: parameters that it reaches in the first of two segments}.

    "" is that segment's loss, "next-" the second one's. `first`: a document starts there.
    """
    ref = PAPERS[paper].reference
    passes = []
    for segment in tokens:
        logits, state, cache = ref.forward(params, config, segment, state, None, *task)
        targets = np.roll(segment, 1, axis=1)
        _, loss_cache = ref.cross_entropy_forward(logits, targets, np.ones(segment.shape, bool))
        passes.append((cache, ref.cross_entropy_backward(1.0, loss_cache)))
    (cache, dlogits), (later, later_dlogits) = passes
    _, dnext = ref.backward(params, config, later, later_dlogits)

    def of_first_segment(*arriving):
        grads, dstate = ref.backward(params, config, cache, *arriving)
        if first and "first" in GROUPS[paper]:  # the initial state is learned
            grads |= ref.initial_state_backward(config, dstate)
        return reached(grads)

    found = {
        "": of_first_segment(dlogits),
        "next-": of_first_segment(np.zeros_like(dlogits), dnext),
    }
    if "compression" in GROUPS[paper]:
        _, auxiliary = ref.auxiliary_forward(params, config, cache)
        found["compression"] = reached(ref.auxiliary_backward(config, 1.0, auxiliary))
        found["next-compression"] = set()
    return found


def cells(paper, params, names):
    """{group: ALL, PART or ZERO of its parameters are among names}."""
    groups = {}
    for name in params:
        groups.setdefault(group_of(paper, name), []).append(name in names)
    found = dict.fromkeys(groups, PART)
    for group, hits in groups.items():
        if all(hits):
            found[group] = ALL
        elif not any(hits):
            found[group] = ZERO
    return found


@over(PAIRS)
def test_each_loss_reaches_what_the_paper_says_and_nothing_else(paper, name):
    """By group it is as tests/tools/reach.txt says; all others get exactly 0."""
    own = PAPERS[paper]
    config, rng, params, middle, _, _ = both_sides(paper, name)
    tokens = rng.integers(config.vocabulary, size=(2, 2, config.segment))
    for kind, label in enumerate(TASKS if name in own.tasks else TASKS[:1]):
        task = [own.random_task(config, rng, [kind, kind])] if kind else []
        for when in ("first", "later"):  # the segment's place in its document
            first = when == "first"
            state = own.reference.initial_state(params, config, 2) if first else middle
            reached_by = by_the_reference(paper, params, config, tokens, first, state, task)
            for loss, names in reached_by.items():
                subject = f"{loss if 'compression' in loss else loss + label} {when} {name}"
                check_cells(subject, cells(paper, params, names), expected_cells(paper, subject))


def check_cells(subject, found, expected):
    for group, cell in found.items():
        assert cell == expected[group], (
            f"{subject}: of the group {group} it reaches {cell}, expected {expected[group]}"
        )
