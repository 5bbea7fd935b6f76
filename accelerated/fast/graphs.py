"""Back-propagation by CUDA graphs, which a GPU takes while shapes stay the same.

    CapturedBackprop(model, method)   equals replay.through_time or replay.memory_replay

A segment of a small model is a thousand launches, and a GPU waits for each of them. A graph records
launches once and repeats them as one: a step of Memformer took 1,136 ms on an H100, and takes 213.
What is recorded is the model: reading a segment, and its backward pass. The loss between them is
not: how many rows an adaptive softmax's tail has differs from segment to segment.

A graph reads and writes fixed memory. So its inputs are copied there, and its results are copied
from there before the next one writes over them. There is a graph for each Kind of stretch: some
segments that are read one after another, and whose gradients are then computed together. Full BPTT
has one stretch of all segments, memory replay has stretches of one segment.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from accelerated.data.lanes import Segment
from accelerated.memory_replay import (
    Gradients,
    detach,
    last_to_first,
    seeded,
    zeros_if_none,
)
from accelerated.protocol import Model, Reading, State, require_gradient
from accelerated.replay import (
    BACKPROP,
    Losses,
    Result,
    advance_segment,
    parts_of_the_objective,
    read_segment,
    segment_cross_entropy,
    summed_losses,
)

# Where a module keeps a parameter, under which name, and the parameter
Places = list[tuple[dict, str, nn.Parameter]]


class CapturedBackprop:
    """A method of replay.BACKPROP for one model, by graphs if all segments have one shape."""

    def __init__(self, model: Model, method: str):
        self.model = model
        self.method = method
        self.places: Places = [
            (module._parameters, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.graphs: Graphs | None = None

    def __call__(
        self,
        model: Any,
        segments: Sequence[Segment],
        state: State,
        divisor: float | None = None,
        share: float = 1.0,
        rank: int = 0,
    ) -> Result:
        """The same as the method."""
        if len({segment.tokens.shape for segment in segments}) > 1:
            return BACKPROP[self.method](model, segments, state, divisor, share, rank)

        seeds, divisor, weight = parts_of_the_objective(segments, divisor, share, rank)
        graphs = self.graphs_for(segments[0], state, weight)

        parts: list[Tensor] = []
        auxiliary: list[Losses] = []

        def advance(pair: tuple[Segment, int], before: State) -> State:
            return graphs.advance(*pair, before)

        def replay(
            pair: tuple[Segment, int], before: State, dafter: Gradients | None
        ) -> tuple[State, Gradients]:
            segment, seed = pair
            is_first = len(parts) == len(segments) - 1  # they come last to first
            [part], [losses], after, dbefore = graphs.back_propagate(
                [segment], [seed], before, divisor, dafter, is_first
            )
            parts.append(part)
            auxiliary.append(losses)
            return after, dbefore

        graphs.begin()
        if self.method == "memory_replay":
            pairs = list(zip(segments, seeds, strict=True))
            last = last_to_first(pairs, detach(state), advance, replay)
        else:
            parts, auxiliary, last, _ = graphs.back_propagate(segments, seeds, state, divisor)
        graphs.end()
        return functools.reduce(torch.add, parts), summed_losses(auxiliary, weight), last

    def graphs_for(self, segment: Segment, state: State, weight: float) -> "Graphs":
        """The graphs for these shapes and this memory; other graphs are dropped."""
        key = (
            weight,
            [(x.shape, x.dtype) for x in (segment.tokens, *state)],
            [(holder[name].data_ptr(), holder[name].dtype) for holder, name, _ in self.places],
        )
        if self.graphs is None or self.graphs.key != key:
            self.graphs = None
            gc.collect()  # its memory, before others take some: a Stretch refers to its Graphs
            self.graphs = Graphs(key, self.model, self.places, weight)
        return self.graphs


def takes_graphs(training: Any, device: torch.device) -> bool:
    """Whether a TrainingConfig and a device allow back-propagation by CUDA graphs.

    Gradient checkpointing, of layers or of segments, is not captured; memory replay is.
    """
    computes_again = training.checkpoint_layers or training.backprop == "checkpointed"
    is_asked_for = training.compile in ("auto", "cudagraphs")
    return device.type == "cuda" and is_asked_for and not computes_again


class Kind(NamedTuple):
    """What distinguishes the graphs of two stretches: they have other launches or inputs."""

    segments: int
    starts: bool  # whether a document starts in any of them
    tasks: tuple[bool, ...]  # whether each segment has a task
    first: bool  # whether its state gets no gradient
    last: bool  # whether no gradient comes from its next state


class Graphs:
    """All graphs of a model for one shape of segments, and the sums of gradients they add to."""

    def __init__(self, key: Any, model: Model, places: Places, weight: float):
        self.key = key
        self.model = model
        self.places = places
        self.weight = weight
        # A parameter in the type that the model computes in; it shares the memory of its copy
        self.leaves = [
            holder[name].detach().requires_grad_(parameter.requires_grad)
            for holder, name, parameter in places
        ]
        # Gradients are summed in the type of the parameters
        self.sums = [torch.zeros_like(parameter) for _, _, parameter in places]
        self.stretches: dict[Kind, Stretch] = {}
        self.advances: dict[tuple[bool, bool], Advance] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        """Set all sums to zero."""
        torch.ops.aten._foreach_zero_(self.sums)
        self.used = [False] * len(self.places)  # whether a parameter has got a gradient

    def advance(self, segment: Segment, seed: int, state: State) -> State:
        """The state after a segment, without gradient."""
        kind = (segment.any_starts, segment.task is not None)
        if kind not in self.advances:
            self.advances[kind] = Advance(self, segment, state)
        return self.advances[kind].run(segment, seed, state)

    def back_propagate(
        self,
        segments: Sequence[Segment],
        seeds: Sequence[int],
        state: State,
        divisor: float,
        dafter: Gradients | None = None,
        first: bool = True,
    ) -> tuple[list[Tensor], list[Losses], State, Gradients]:
        """Read a stretch of segments, and add its gradients to the sums and to .grad.

        dafter is the gradient of the state after the stretch. Returns each segment's loss and
        auxiliary losses, the state after the stretch, and the gradient of the state before it,
        which the first stretch does not compute.
        """
        starts = any(segment.any_starts for segment in segments)
        tasks = tuple(segment.task is not None for segment in segments)
        kind = Kind(len(segments), starts, tasks, first, dafter is None)
        if kind not in self.stretches:
            sums = copied(self.sums)
            self.stretches[kind] = Stretch(self, kind, segments, state)
            torch.ops.aten._foreach_copy_(self.sums, sums)  # recording adds, too
        stretch = self.stretches[kind]
        found = stretch.run(segments, seeds, state, divisor, dafter)
        self.used = [a or b for a, b in zip(self.used, stretch.used, strict=True)]
        return found

    def end(self) -> None:
        """Add the sums to the parameters' .grad; one without gradient keeps none."""
        for (_, _, parameter), total, used in zip(self.places, self.sums, self.used, strict=True):
            if not used:
                continue
            if parameter.grad is None:
                parameter.grad = total.clone()
            else:
                parameter.grad += total

    def add_to_sums(self, gradients: Sequence[Tensor | None]) -> None:
        """Add each gradient to its sum, in the sum's type."""
        sums = []
        arrived = []
        for total, gradient in zip(self.sums, gradients, strict=True):
            if gradient is not None:
                sums.append(total)
                arrived.append(gradient)
        if arrived:
            converted = [torch.empty_like(total) for total in sums]
            torch.ops.aten._foreach_copy_(converted, arrived)
            # The packet of overloads would try each, and describe the tensors, whose numbers the
            # host would ask for
            torch.ops.aten._foreach_add_.List(sums, converted)

    @contextlib.contextmanager
    def computing_with_leaves(self) -> Iterator[None]:
        """Inside, the model's parameters are the leaves, whose gradients can be asked for."""
        before = [holder[name] for holder, name, _ in self.places]
        for (holder, name, _), leaf in zip(self.places, self.leaves, strict=True):
            holder[name] = leaf
        try:
            yield
        finally:
            for (holder, name, _), weight in zip(self.places, before, strict=True):
                holder[name] = weight


class Advance:
    """The graph that gives the state after a segment."""

    def __init__(self, graphs: Graphs, segment: Segment, state: State):
        self.inputs = Inputs(segment, segment.any_starts)
        self.state = copied(detach(state))

        def compute() -> State:
            with torch.no_grad():
                return advance_segment(graphs.model, self.inputs.segment, self.state)

        [(self.graph, self.after)] = record([compute], graphs)

    def run(self, segment: Segment, seed: int, state: State) -> State:
        """The state after this segment."""
        self.inputs.fill(segment)
        fill(self.state, state)
        launch(self.graph, seed, state[0].device)
        return copied(self.after)


class Stretch:
    """The graphs of some segments: one reads each, one is the backward pass of all."""

    def __init__(self, graphs: Graphs, kind: Kind, segments: Sequence[Segment], state: State):
        self.graphs = graphs
        self.kind = kind
        self.inputs = [Inputs(segment, kind.starts) for segment in segments]
        self.state = copied(detach(state))
        self.before = self.state if kind.first else require_gradient(self.state)
        self.dafter = [torch.zeros_like(field) for field in floating_fields(self.state)]
        self.readings: list[Reading] = []
        self.dhidden: list[Tensor] = []
        self.used: list[bool] = []
        functions = [functools.partial(self.read, number) for number in range(kind.segments)]
        self.recorded = record([*functions, self.compute_gradients], graphs)
        self.readings = []  # frees their memory for the graphs of other stretches

    def read(self, number: int) -> Reading:
        """Read a segment after those before it."""
        if number == 0:
            self.readings = []
        state = self.readings[-1].state if number else self.before
        reading = read_segment(self.graphs.model, self.inputs[number].segment, state)
        self.readings.append(reading)
        if len(self.dhidden) == number:
            self.dhidden.append(torch.zeros_like(reading.hidden))
        return reading

    def compute_gradients(self) -> list[Tensor]:
        """Add the parameters' gradients to the sums; returns that of the state before."""
        outputs = [reading.hidden for reading in self.readings]
        gradients = list(self.dhidden)
        for reading in self.readings:
            for loss in reading.auxiliary.values():
                outputs.append(loss)
                gradients.append(torch.full_like(loss, self.graphs.weight))
        if not self.kind.last:
            outputs.extend(floating_fields(self.readings[-1].state))
            gradients.extend(self.dafter)
        attached = [n for n, output in enumerate(outputs) if output.requires_grad]
        outputs = [outputs[n] for n in attached]
        gradients = [gradients[n] for n in attached]

        leaves = {n: leaf for n, leaf in enumerate(self.graphs.leaves) if leaf.requires_grad}
        fields = [] if self.kind.first else floating_fields(self.before)
        inputs = [*fields, *leaves.values()]
        found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        dleaves: list[Tensor | None] = [None] * len(self.graphs.leaves)
        for n, gradient in zip(leaves, found[len(fields) :], strict=True):
            dleaves[n] = gradient
        self.used = [gradient is not None for gradient in dleaves]
        self.graphs.add_to_sums(dleaves)
        arrived = found[: len(fields)]
        return [zeros_if_none(g, field) for g, field in zip(arrived, fields, strict=True)]

    def run(
        self,
        segments: Sequence[Segment],
        seeds: Sequence[int],
        state: State,
        divisor: float,
        dafter: Gradients | None,
    ) -> tuple[list[Tensor], list[Losses], State, Gradients]:
        """What Graphs.back_propagate returns."""
        for inputs, segment in zip(self.inputs, segments, strict=True):
            inputs.fill(segment)
        fill(self.state, state)
        if dafter is not None:
            torch.ops.aten._foreach_copy_(self.dafter, dafter)

        *reads, (backward, dbefore) = self.recorded
        for (graph, _), seed in zip(reads, seeds, strict=True):
            launch(graph, seed, state[0].device)

        parts = []
        auxiliary = []
        for (_, reading), segment, dhidden in zip(reads, segments, self.dhidden, strict=True):
            hidden = reading.hidden.detach().requires_grad_()
            nats = segment_cross_entropy(hidden, self.graphs.model.output_matrix(), segment)
            part = nats / divisor
            part.backward()
            dhidden.copy_(zeros_if_none(hidden.grad, hidden))
            parts.append(part.detach())
            auxiliary.append(copied(detach(reading.auxiliary)))

        backward.replay()
        after = copied(detach(reads[-1][1].state))
        return parts, auxiliary, after, copied(dbefore)


class Inputs:
    """A segment in the memory that a graph reads."""

    def __init__(self, segment: Segment, starts: bool):
        starting = segment.starts.clone()
        task = copied(segment.task)
        tokens = segment.tokens.clone()
        # Targets are the loss's, which is not in the graph
        self.segment = Segment(tokens, tokens, tokens, starting, task, host_starts=starts)

    def fill(self, segment: Segment) -> None:
        """Copy what is read of a segment."""
        own = (self.segment.tokens, self.segment.starts, self.segment.task)
        fill(own, (segment.tokens, segment.starts, segment.task))


def floating_fields(state: State) -> list[Tensor]:
    """The fields of a state that have gradients, which token ids have not."""
    return [field for field in state if field.is_floating_point()]


def tensors_in(given: Any) -> list[Tensor]:
    """All tensors in tuples of tensors, in order; a segment may have no task."""
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def copied(given: Any) -> Any:
    """The same with copies of its tensors."""
    return tree_map_only(Tensor, torch.clone, given)


def fill(places: Any, given: Any) -> None:
    """Copy tensors to their places."""
    for place, tensor in zip(tensors_in(places), tensors_in(given), strict=True):
        place.copy_(tensor)


def launch(graph: Any, seed: int, device: torch.device) -> None:
    """Repeat what a graph has recorded, with the random numbers of a seed."""
    with seeded(seed, device):
        graph.replay()


def record(functions: Sequence[Callable[[], Any]], graphs: Graphs) -> list[tuple[Any, Any]]:
    """A graph for each function, and the results that its replay writes anew.

    The functions run twice before.
    """
    recorded = []
    with seeded(0, graphs.sums[0].device), graphs.computing_with_leaves():
        warm_up([*functions, *functions])
        for function in functions:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=graphs.pool):
                results = function()
            recorded.append((graph, results))
    # Without their autograd graph, which belongs to the stream of the recording
    return [(graph, detach(found)) for graph, found in recorded]


def warm_up(functions: Sequence[Callable[[], Any]]) -> None:
    """Run functions before they are recorded: libraries choose their kernels and take memory."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(aside)
