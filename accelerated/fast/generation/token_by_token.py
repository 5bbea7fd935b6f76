"""What the models' files here share: rows of a segment's tokens, and a token as a CUDA graph."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from accelerated.fast.graphs import copied, fill, warm_up
from accelerated.generation.any_model import Stepper, Stream
from accelerated.protocol import Model, logits_of


class TokenByToken(Stepper):
    """Keeps rows of the segment's tokens, such as keys and values: each token is computed once.

    A model's file has a subclass `Steps`. Its rows are tensors of fixed shapes, and lists of
    tensors, one for each layer. They are written in place.
    """

    def __init__(self, model: Model, captured: bool = False):
        super().__init__(model)
        self.compute = Graph(self.logits_after) if captured else self.plain

    @staticmethod
    def fits(model: Model) -> bool:
        """Whether it reads this model; others of its class are for AnyModel."""
        return True

    @abstractmethod
    def hidden_after(self, token: Tensor, position: Tensor, rows: tuple) -> Tensor:
        """The hidden row (B, D) of token (B,) at position (1,), ready for the output matrix.

        Writes what later tokens read of it into rows.
        """

    def read_token(self, token: Tensor, stream: Stream) -> tuple[Tensor, tuple]:
        return self.compute(token, stream.position, stream.rows)

    def plain(self, token: Tensor, position: int, rows: tuple) -> tuple[Tensor, tuple]:
        """The logits (B, V) after a token, and the rows."""
        return self.logits_after(token, token.new_full((1,), position), rows), rows

    def logits_after(self, token: Tensor, position: Tensor, rows: tuple) -> Tensor:
        """What a CUDA graph captures: logits (B, V) after token (B,) at position (1,)."""
        return logits_of(self.model, self.hidden_after(token, position, rows))


def columns_of_query(position: Tensor, queries: int, keys: int) -> Tensor:
    """Indices (keys,) into by_distance of row `position` (1,) of heads.by_query_and_key."""
    first = torch.arange(queries - 1, queries - 1 + keys, device=position.device)
    return first - position


class Graph:
    """The kernels of a token, captured once in a CUDA graph and then launched together.

    A graph reads and writes fixed addresses, so it has a token, a position and rows of its own;
    each new segment's rows are copied into them, and a Stream of an earlier segment cannot be
    continued. It holds the number of lanes of its first token, and the parameters as they were
    then; a parameter may change in place, but not be replaced.
    """

    def __init__(self, function: Callable[[Tensor, Tensor, tuple], Tensor]):
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, token: Tensor, position: int, rows: tuple) -> tuple[Tensor, tuple]:
        """The logits after a token, and the rows that hold it."""
        if self.graph is None:
            self.graph = self.capture(token, rows)
        if rows is not self.rows:
            fill(self.rows, rows)
        self.token.copy_(token)
        self.position.fill_(position)
        self.graph.replay()
        return self.logits.clone(), self.rows

    def capture(self, token: Tensor, rows: tuple) -> torch.cuda.CUDAGraph:
        """Record a token's kernels, after a first run in which libraries prepare themselves."""
        self.token = token.clone()
        self.position = token.new_zeros(1)
        self.rows = copied(rows)

        given = (self.token, self.position, self.rows)
        warm_up([partial(self.function, *given)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self.function(*given)
        return graph
