"""The table `agreement`: whether a device computes what a CPU does in float64.

Here models are compared, on a device's fastest paths; tests/attention/ compares each attention with
its plain path. TOLERANCE is the one table, for tests too.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.attention.heads import at_least_float32
from accelerated.generation.token_by_token import stepper_of
from accelerated.lab.speed.timing import first_line, print_table
from accelerated.models import NAMES, model_class, presets_of
from accelerated.protocol import computing_in, evaluating

# relative error of outputs and gradients, by device and dtype; the comment is the worst error
# measured
TOLERANCE = {
    ("cpu", torch.float64): 1e-12,  # 1e-15
    ("cpu", torch.float32): 2e-5,  # 2e-6
    ("cpu", torch.bfloat16): 3e-2,  # 2.6e-2
    ("cuda", torch.float32): 1e-4,
    ("cuda", torch.bfloat16): 3e-2,
}
DIRECTION = 1e-3  # 1 - cosine of all gradients of a model together, in bfloat16; 1.1e-4
STEPS = 32  # tokens that are read one by one


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """The largest difference divided by the largest expected magnitude.

    Infinite if anything is NaN or infinite.
    """
    expected = expected.detach().cpu().double()
    actual = actual.detach().cpu().double()
    largest = expected.abs().max().clamp(min=1e-30)
    error = ((actual - expected).abs().max() / largest).item()
    return error if math.isfinite(error) else math.inf


@torch.no_grad()
def read_one_by_one(network: nn.Module, read: Tensor, tokens: Tensor) -> Tensor:
    """The logits (B, n, V) of tokens (B, n), read one by one after a segment `read` at once."""
    with evaluating(network):
        stepper = stepper_of(network)
        stream = stepper.start(network.advance(read, network.initial_state(len(read))))
        stepped = []
        for token in tokens.unbind(1):
            logits, stream = stepper.step(token, stream)
            stepped.append(logits)
    return torch.stack(stepped, 1)


def model_results(model: str, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits and next state of the second of two segments, gradients, and logits token by token."""
    facts = presets_of(model)
    config = facts.Config(**facts.SPEED["sizes"] | facts.SPEED["small"])
    network = model_class(model)(config).to(device, torch.promote_types(dtype, torch.float32))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (2, 2, config.segment), generator=generator)
    tokens = tokens.to(device)

    with computing_in(network, dtype):
        first = network(tokens[0], network.initial_state(2))
        second = network(tokens[1], first.state)
        logits = at_least_float32(second.logits).flatten(0, 1)
        loss = functional.cross_entropy(logits, tokens[1].flatten())
        (loss + sum(first.auxiliary.values())).backward()
        stepped = read_one_by_one(network, tokens[0], tokens[1, :, :STEPS])

    results = {"logits": second.logits}
    for name, field in second.state._asdict().items():
        if field.numel():
            results[f"state: {name}"] = field
    results["generation"] = stepped
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    results["gradients"] = torch.cat([each.double().flatten().cpu() for each in gradients])
    return results


def errors_of(
    model: str, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, float, float]]:
    """(what, its error, allowed) of a model.

    In bfloat16 a gradient is held by its direction: ReLUs near zero flip.
    """
    expected = model_results(model, torch.device("cpu"), torch.float64)
    actual = model_results(model, device, dtype)
    for name, x in expected.items():
        if name == "gradients" and dtype == torch.bfloat16:
            cosine = functional.cosine_similarity(x, actual[name], dim=0).item()
            yield f"{name}, 1 - cosine", 1 - cosine, DIRECTION
        else:
            yield name, relative_error(x, actual[name]), TOLERANCE["cuda", dtype]


def rows_of(model: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, ...]]:
    """A row for each thing of a model that is compared; if it cannot be run, one that says why."""
    kind = str(dtype).removeprefix("torch.")
    try:
        for what, error, allowed in errors_of(model, device, dtype):
            verdict = "ok" if error <= allowed else "FAIL"  # that of NaN too
            yield model, kind, what, f"{error:.1e}", f"{allowed:.0e}", verdict
    except Exception as error:
        yield model, kind, first_line(error), "-", "-", "FAIL"


def report(device: torch.device) -> None:
    """Print a row for each thing compared; exits with code 1 if one fails."""
    head = ("model", "type", "of it", "largest difference / largest magnitude", "allowed", "")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for model in NAMES:
            rows += rows_of(model, device, dtype)
    print_table(head, *rows)
    if any(row[-1] == "FAIL" for row in rows):
        raise SystemExit(1)
