"""--checkpoint-layers: layers keep only their inputs, and the gradients are the same.

Each layer is computed again in the backward pass.
"""

import dataclasses

import pytest
import torch

from accelerated import replay
from accelerated.training.optimization import backprop_of
from accelerated.training.settings import TrainingConfig
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import back_propagated, setting
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, pairs, variant

TOLERANCE = 1e-12  # float64, relative; the worst error measured is 0
CASES = ONE_OF_EACH + pairs(
    block_recurrent="lstm-dual-feedback adjacent-recurrent-lstm",
    compressive="conv-attention_reconstruction conv-auto_encoding most_used-none",
    memformer="encoder-decoder-xl",
    pretrained_recurrence="plain at-every-layer",
)


def recompute(model):
    """Make the model what --checkpoint-layers makes of it."""
    backprop_of(model, TrainingConfig(checkpoint_layers=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@over(CASES)
def test_the_gradients_are_the_same_with_dropout(paper, name, dtype):
    """By each method; the global generator then stands where it stood.

    In bfloat16 a layer has the same copies of parameters.
    """
    model, *given = setting(paper, name)
    expected = {}
    random = {}
    for method in replay.BACKPROP:
        expected[method] = back_propagated(method, model, *given, dtype)
        random[method] = torch.get_rng_state()
    recompute(model)
    for method in replay.BACKPROP:
        found = back_propagated(method, model, *given, dtype)
        assert_agree(expected[method], found, TOLERANCE, method)
        assert torch.equal(torch.get_rng_state(), random[method]), method


def saved_bytes(model, segment, state):
    """Bytes that are kept for the backward pass of a segment, beside the parameters."""
    sizes = {}  # of each storage, which several tensors may share

    def keep(tensor):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.read(segment, state)
    for parameter in model.parameters():
        sizes.pop(parameter.untyped_storage()._cdata, None)
    return sum(sizes.values())


@over(ONE_OF_EACH)
def test_only_the_layers_inputs_are_kept(paper, name):
    """At sizes at which the layers' own activations dominate."""
    if not PAPERS[paper].has_checkpointable:
        pytest.skip("it has no layer that can be checkpointed")
    sizes = {"feed_forward": 512, "width": 40, "dropout": 0.1}
    sizes |= {"head_width": 16} if paper != "pretrained_recurrence" else {"width": 32}
    config = dataclasses.replace(variant(paper, name), **sizes)
    with torch.device("meta"):
        model = PAPERS[paper].model(config).train()
        tokens = torch.zeros(2, config.segment, dtype=torch.long)
        state = model.initial_state(2)
    whole = saved_bytes(model, tokens, state)
    recompute(model)
    assert saved_bytes(model, tokens, state) < 0.25 * whole
