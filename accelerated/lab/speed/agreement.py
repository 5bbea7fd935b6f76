"""The table `agreement`: whether a device computes what a CPU does in float64. TOLERANCE is the one table, for tests too.

Here models are compared, on a device's fastest paths; tests/attention/ compares each attention with its plain path.
"""

import math
from argparse import Namespace
from collections.abc import Iterator

import torch
from torch.nn import functional

from accelerated.attention.heads import at_least_float32
from accelerated.generation.token_by_token import stepper_of
from accelerated.lab.speed.timing import first_line, print_table
from accelerated.models import NAMES, model_class, presets_of
from accelerated.protocol import computing_in, evaluating

# relative error of outputs and gradients, by device and dtype; the comment is the worst error measured
TOLERANCE = {
    ("cpu", torch.float64): 1e-12,  # 1e-15
    ("cpu", torch.float32): 2e-5,  # 2e-6
    ("cpu", torch.bfloat16): 3e-2,  # 2.6e-2
    ("cuda", torch.float32): 1e-4,
    ("cuda", torch.bfloat16): 3e-2,
}
DIRECTION = 1e-3  # 1 - cosine of all gradients of a model together, in bfloat16; 1.1e-4


def relative_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest difference divided by the largest expected magnitude; infinite if anything is NaN or infinite."""
    expected, actual = expected.detach().cpu().double(), actual.detach().cpu().double()
    error = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    return error if math.isfinite(error) else math.inf


def model_results(model: str, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What two segments give: logits and next state of the second, gradients, and logits token by token (generation)."""
    facts, generator = presets_of(model), torch.Generator().manual_seed(0)
    config = facts.Config(**facts.SPEED["sizes"] | facts.SPEED["small"])
    network = model_class(model)(config).to(device, torch.promote_types(dtype, torch.float32))
    tokens = torch.randint(config.vocabulary, (2, 2, config.segment), generator=generator).to(
        device
    )
    with computing_in(network, dtype):
        first = network(tokens[0], network.initial_state(2))
        second = network(tokens[1], first.state)
        loss = functional.cross_entropy(
            at_least_float32(second.logits).flatten(0, 1), tokens[1].flatten()
        )
        (loss + sum(first.auxiliary.values())).backward()
        with evaluating(network), torch.no_grad():
            stepper = stepper_of(network)
            state = network.advance(tokens[0], network.initial_state(2))
            stream = stepper.start(state)
            stepped = []
            for token in tokens[1, :, :32].unbind(1):
                logits, stream = stepper.step(token, stream)
                stepped.append(logits)
    states = {
        f"state: {name}": field for name, field in second.state._asdict().items() if field.numel()
    }
    gradients = torch.cat(
        [p.grad.double().flatten().cpu() for p in network.parameters() if p.grad is not None]
    )
    return (
        {"logits": second.logits}
        | states
        | {"generation": torch.stack(stepped, 1), "gradients": gradients}
    )


def errors_of(
    model: str, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, float, float]]:
    """(what, its error, allowed) of a model. In bfloat16 a gradient is held by its direction: ReLUs near zero flip."""
    expected, actual = (
        model_results(model, torch.device("cpu"), torch.float64),
        model_results(model, device, dtype),
    )
    for name, x in expected.items():
        if name == "gradients" and dtype == torch.bfloat16:
            yield (
                f"{name}, 1 - cosine",
                1 - functional.cosine_similarity(x, actual[name], dim=0).item(),
                DIRECTION,
            )
        else:
            yield name, relative_error(x, actual[name]), TOLERANCE["cuda", dtype]


def report(options: Namespace) -> None:
    """Print a row for each thing compared; exits with code 1 if one fails."""
    rows = [("model", "type", "of it", "largest difference / largest magnitude", "allowed", "")]
    for dtype in (torch.float32, torch.bfloat16):
        for model in NAMES:
            try:
                for what, error, allowed in errors_of(model, options.device, dtype):
                    passes = error <= allowed  # false for NaN
                    rows.append(
                        (
                            model,
                            str(dtype)[6:],
                            what,
                            f"{error:.1e}",
                            f"{allowed:.0e}",
                            "ok" if passes else "FAIL",
                        )
                    )
            except Exception as error:
                rows.append((model, str(dtype)[6:], first_line(error), "-", "-", "FAIL"))
    print_table(*rows)
    if any(row[-1] == "FAIL" for row in rows):
        raise SystemExit(1)
