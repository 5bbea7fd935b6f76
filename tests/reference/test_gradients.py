"""Whole references against finite differences: named variants of every kind, over segments.

tests/test_contract.py holds the gradients of all others to autograd's.
"""

from reference.gradients import Case
from tests.helpers.rollouts import both_sides, random_segments
from tests.helpers.variants import MORE_KINDS, PAPERS, listed, over
from tests.start_here.test_gradients import check_gradients


@over([*MORE_KINDS, *listed("other_types"), ("block_recurrent", "two-recurrent")])
def test_model_gradient(paper, name):
    """Of all losses, by every parameter and the first state, over three segments with all tasks.

    A document starts in the second. What a paper stops is held at its value while the objective is
    differentiated.
    """
    config, rng, params, state, *_ = both_sides(paper, name)
    segments = random_segments(paper, name, rng)[:3]
    case = Case(PAPERS[paper].reference, config, params, state, segments)
    check_gradients(f"{paper} {name}", case, rng)
