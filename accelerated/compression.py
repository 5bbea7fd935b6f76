"""The Compressive Transformer's compression: the functions f_c, and what a loss makes of an error.

Section 3.2. Each function is a module; reference/compressive.py has the same by the same names.
"""

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import ParameterModule, at_least_float32, parameter
from reference.compressive import Config


class Compression(ParameterModule):
    """A compression function f_c: rows evicted from memory (B, N, D) -> (B, N/c, D).

    `forward` takes them, and of each its mean attention, usage (B, N). N/c is rounded down.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.rate = config.compression_rate
        self.declare_weights(config.width)
        if config.compression_loss.startswith("auto_encoding"):
            self.decoder = parameter(self.rate * config.width, config.width)  # g, (cD, D)

    def declare_weights(self, width: int) -> None:
        """Declare the parameters of f_c; pooling has none."""

    def grouped(self, evicted: Tensor) -> Tensor:
        """Every c rows of evicted (B, N, D) as a group, (B, N/c, c, D); the newest may be left."""
        count = evicted.shape[1] // self.rate
        return evicted[:, : count * self.rate].unflatten(1, (count, self.rate))

    def reconstructed(self, new: Tensor) -> Tensor:
        """The evicted rows (B, N, D) as the decoder makes them from the compressed (B, N/c, D).

        Rows that are in no group are zeros.
        """
        rows = functional.linear(new, self.decoder)  # (B, N/c, cD)
        rows = rows.view(len(new), -1, self.config.width)
        return functional.pad(rows, (0, 0, 0, self.config.segment - rows.shape[1]))


class MaxPooling(Compression):
    """Feature by feature the largest of c rows."""

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        return self.grouped(evicted).amax(2)


class MeanPooling(Compression):
    """The mean of c rows."""

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        return self.grouped(evicted).mean(2)


class MostUsed(Compression):
    """The N/c rows with the largest usage, in order of time; of equally used rows the older."""

    def forward(self, evicted: Tensor, usage: Tensor) -> Tensor:
        _, length, width = evicted.shape
        by_usage = usage.argsort(dim=1, descending=True, stable=True)  # (B, N)
        kept = by_usage[:, : length // self.rate].sort(1).values  # (B, N/c)
        return evicted.gather(1, kept[:, :, None].expand(-1, -1, width))


class Conv(Compression):
    """A convolution with kernel and stride c: c rows are concatenated, then one matrix."""

    def declare_weights(self, width: int) -> None:
        self.weight = parameter(width, self.rate * width)  # (D, cD)

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        return functional.linear(self.grouped(evicted).flatten(2), self.weight)


class DilatedConv(Conv):
    """A convolution with kernel 2 and a ReLU for each dilation, then a Conv."""

    def declare_weights(self, width: int) -> None:
        for dilation in self.config.dilations:
            self.register_parameter(f"dilated_{dilation}", parameter(width, 2 * width))  # (D, 2D)
        super().declare_weights(width)

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        x = evicted
        for dilation in self.config.dilations:
            if self.config.authors_code:  # row i - dilation, for the rows that have one
                earlier = x[:, :-dilation]
                later = x[:, dilation:]
            else:  # zeros before the first row
                earlier = functional.pad(x, (0, 0, dilation, 0))[:, : x.shape[1]]
                later = x
            pairs = torch.cat([earlier, later], -1)  # (B, N, 2D)
            x = torch.relu(functional.linear(pairs, getattr(self, f"dilated_{dilation}")))
        return super().forward(x, usage)


COMPRESSIONS = {
    "max_pooling": MaxPooling,
    "mean_pooling": MeanPooling,
    "conv": Conv,
    "dilated_conv": DilatedConv,
    "most_used": MostUsed,
}


def mean_square(x: Tensor, y: Tensor) -> Tensor:
    """The mean of (x - y)^2, in float32 or better."""
    return functional.mse_loss(at_least_float32(x), at_least_float32(y))


def mean_norm(x: Tensor, y: Tensor) -> Tensor:
    """The mean over lanes of the norm of x - y (B, ...), as Algorithm 2, line 8 has it.

    Its gradient is 0 if x = y, where it has no derivative.
    """
    difference = at_least_float32(x) - at_least_float32(y)
    return torch.linalg.vector_norm(difference.flatten(1), dim=1).mean()


def error_of(config: Config, x: Tensor, y: Tensor) -> Tensor:
    """What the config's compression loss makes of x - y."""
    if config.compression_loss.endswith("_norm"):
        return mean_norm(x, y)
    return mean_square(x, y)
