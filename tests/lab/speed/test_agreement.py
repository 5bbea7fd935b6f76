"""A GPU computes what a CPU does in float64, on its fastest paths and at the sizes of the bench.

Without a GPU it is the CPU that is compared, at tiny sizes. tests/attention/ compares each
attention with its plain path.
"""

import pytest
import torch
from torch.nn import functional

from accelerated.models import NAMES, model_class, presets_of
from tests.helpers.comparison import TOLERANCE, assert_agree
from tests.helpers.reading import computed
from tests.helpers.variants import PAPERS

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIRECTION = 1e-3  # 1 - cosine of all gradients of a model together, in bfloat16; at most 2.9e-4


def config_of(model):
    """The Config that the bench measures, with sizes at which rounding crosses no ReLU's kink."""
    if DEVICE == CPU:
        return PAPERS[model].small
    facts = presets_of(model)
    return facts.Config(**facts.BENCHMARK["sizes"] | facts.BENCHMARK["small"])


def results(model, device, kind):
    """({name: what `computed` gives}, all gradients)."""
    config = config_of(model)
    network = model_class(model)(config).to(device, torch.promote_types(kind, torch.float32))
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (2, 2, config.segment), generator=drawn).to(device)
    found, gradients = computed(network, tokens, kind)
    return found, torch.cat([each.flatten() for each in gradients.values()])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", NAMES)
def test_a_device_computes_what_a_cpu_does_in_float64(model, kind):
    """In bfloat16 gradients are held by their direction: ReLUs near zero flip."""
    torch.set_default_dtype(torch.float32)
    expected, gradients = results(model, CPU, torch.float64)
    actual, found = results(model, DEVICE, kind)
    if kind == torch.bfloat16:
        assert 1 - functional.cosine_similarity(gradients, found, dim=0) <= DIRECTION
    else:
        expected["gradients"] = gradients
        actual["gradients"] = found
    assert_agree(expected, actual, TOLERANCE["cuda", kind], f"{model} on {DEVICE}")
