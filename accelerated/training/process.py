"""This process: its device, its rank among several, and the memory that it keeps.

train.py, opening.py and run.py, eval.py and lab/speed use this file.
"""

import contextlib
import ctypes
import datetime
import gc
import os
import sys
from collections.abc import Iterable, Iterator

import torch
import torch.distributed

from accelerated.program.errors import InputError
from accelerated.protocol import State

PATIENCE = datetime.timedelta(hours=24)  # while the first process tokenises or validates
M_TRIM_THRESHOLD = -1  # of glibc's mallopt
M_MMAP_MAX = -4


def choose_device(name: str | torch.device) -> torch.device:
    """The torch device of that name: auto takes a GPU if there is one.

    Each process of torchrun has a GPU of its own. Raises InputError if torch has no such device
    here.
    """
    found = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if name == "auto":
        name = found[-1]
    kind, _, number = str(name).partition(":")
    if kind not in found or not f"0{number}".isdecimal():
        raise InputError(f"device {name}: torch finds none here; give {' or '.join(found)}")
    if kind == "cpu":
        return torch.device(kind)
    own = int(number or set_by_torchrun("LOCAL_RANK", torch.cuda.current_device()))
    gpus = torch.cuda.device_count()
    if own >= gpus:
        raise InputError(
            f"GPU {own} is asked for, and torch finds {gpus}, from 0 on; "
            "torchrun starts one process for each"
        )
    return torch.device(kind, own)


def world_size() -> int:
    """How many processes train together."""
    return set_by_torchrun("WORLD_SIZE", 1)


def rank() -> int:
    """The number of this process, from 0."""
    return set_by_torchrun("RANK", 0)


def set_by_torchrun(name: str, alone: int) -> int:
    """A number that torchrun puts into the environment; `alone` without torchrun."""
    return int(os.environ.get(name, alone))


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Inside the block, join the process group: NCCL on GPUs, gloo otherwise."""
    if world_size() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=PATIENCE)
    try:
        yield
        wait_for_all()  # no process leaves while another may still need it
    finally:
        gc.collect()  # an object that refers to a closed connection can abort the process at exit
        torch.distributed.destroy_process_group()


def wait_for_all() -> None:
    """Wait until every process has made this call."""
    if world_size() > 1:
        torch.distributed.barrier()


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the block in the first process, then in the others.

    They run it even if it raises there, to raise the same error.
    """
    if rank() > 0:
        wait_for_all()
    try:
        yield
    finally:
        if rank() == 0:
            wait_for_all()


def lane_count(batch: int) -> int:
    """How many of the lanes (documents read side by side) each process has.

    Raises InputError if they do not divide evenly.
    """
    processes = world_size()
    if batch % processes:
        raise InputError(
            f"--batch {batch} cannot be divided by {processes} processes; "
            f"give a multiple of {processes}"
        )
    return batch // processes


def own_lanes(batch: int) -> slice:
    """The slice of the lanes of this process."""
    count = lane_count(batch)
    return slice(rank() * count, (rank() + 1) * count)


def all_reduce_sum(values: list, device: torch.device) -> list:
    """Each number of a list, summed over all processes."""
    if world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def read_numbers(measured: dict[str, torch.Tensor]) -> dict[str, float]:
    """Copy {name: scalar tensor} to the host in one transfer, as {name: float}.

    "loss" is summed over all processes, everything else is averaged.
    """
    stacked = torch.stack([*measured.values()])
    numbers = {}
    for name, total in zip(measured, all_reduce_sum(stacked.tolist(), stacked.device), strict=True):
        numbers[name] = total if name == "loss" else total / world_size()
    return numbers


def gather_lanes(state: State) -> State:
    """The State of all processes' lanes, in their order, on the CPU.

    In a single process it is `state` itself, on its device.
    """
    if world_size() == 1:
        return state
    fields = []
    for field in state:
        parts = [torch.empty_like(field) for _ in range(world_size())]
        torch.distributed.all_gather(parts, field.contiguous())
        fields.append(torch.cat([part.cpu() for part in parts]))
    return state._make(fields)


def average_gradients(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> None:
    """Replace every gradient by its mean over all processes.

    It stays None if it is None in every process.
    """
    if world_size() == 1:
        return
    parameters = list(parameters)
    users = all_reduce_sum([float(parameter.grad is not None) for parameter in parameters], device)
    for parameter, count in zip(parameters, users, strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world_size()


def keep_freed_memory() -> None:
    """Make glibc's allocator keep what is freed; does nothing without glibc.

    It takes large blocks from its heap and never trims it. A training step frees and allocates the
    same activations again and again. By default glibc maps each large block anew and the kernel
    fills its pages with zeros, which costs more than many of the operations that use them.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
