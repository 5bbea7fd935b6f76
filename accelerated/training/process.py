"""This process: its device, its rank among several, and its memory. For train.py, run.py, eval.py and lab/speed."""

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

PATIENCE = datetime.timedelta(
    hours=24
)  # the others wait while the first process tokenises or validates
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt


def choose_device(name: str) -> torch.device:
    """The torch device of --device: auto takes a GPU if there is one. Each process of torchrun has its own.

    Raises InputError if the GPU does not exist.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; use --device cpu or auto")
    number, gpus = (
        int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())),
        torch.cuda.device_count(),
    )
    if number >= gpus:
        raise InputError(
            f"torchrun started more than {number} processes here, torch finds {gpus} GPUs; start one for each"
        )
    return torch.device("cuda", number)


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def connected(device: torch.device) -> Iterator[None]:
    """Inside the block, be connected to the other processes: by NCCL if they have GPUs, otherwise by gloo."""
    if world_size() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE
    )
    try:
        yield
        wait_for_all()  # no process leaves while another may still need it
    finally:
        gc.collect()  # an object that still refers to the closed connection can abort the process at exit
        torch.distributed.destroy_process_group()


def wait_for_all() -> None:
    """Wait until every process has made this call."""
    if world_size() > 1:
        torch.distributed.barrier()


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """Run the block in the first process, then in the others; they run it even if it raises there, to raise the same error."""
    if rank() > 0:
        wait_for_all()
    try:
        yield
    finally:
        if rank() == 0:
            wait_for_all()


def own_lanes(batch: int) -> slice:
    """The slice of the lanes (documents read side by side) of this process; raises InputError if they do not divide evenly."""
    if batch % world_size():
        raise InputError(
            f"--batch {batch} cannot be divided by {world_size()} processes; give a multiple of {world_size()}"
        )
    size = batch // world_size()
    return slice(rank() * size, (rank() + 1) * size)


def summed(values: list, device: torch.device) -> list:
    """Sum each number of a list over all processes."""
    if world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def read_numbers(measured: dict[str, torch.Tensor]) -> dict[str, float]:
    """{name: scalar tensor} as {name: float}, read from the device at once; means of all processes, of "loss" the sum."""
    stacked = torch.stack([*measured.values()])
    totals = zip(measured, summed(stacked.tolist(), stacked.device), strict=True)
    return {name: total if name == "loss" else total / world_size() for name, total in totals}


def all_lanes(state: tuple) -> tuple:
    """The states of all processes' lanes, in their order, on the CPU of the first process; the others keep their own."""
    if world_size() == 1:
        return state

    def gathered(field):
        parts = [torch.empty_like(field) for _ in range(world_size())] if rank() == 0 else None
        torch.distributed.gather(field.contiguous(), parts)
        return torch.cat([part.cpu() for part in parts]) if parts else field

    return type(state)(*map(gathered, state))


def average_gradients(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> None:
    """Replace every gradient by its mean over all processes; it stays None if it is None in every process."""
    if world_size() == 1:
        return
    parameters = list(parameters)
    users = summed([float(parameter.grad is not None) for parameter in parameters], device)
    used = [parameter for parameter, count in zip(parameters, users, strict=True) if count]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in used])
    torch.distributed.all_reduce(flat)
    for parameter, mean in zip(
        used, (flat / world_size()).split([p.numel() for p in used]), strict=True
    ):
        parameter.grad = mean.view_as(parameter)


def keep_freed_memory() -> None:
    """Make glibc's allocator take large blocks from its heap and never trim it; does nothing without glibc.

    A training step frees and allocates the same activations again and again. By default glibc maps each large block anew and
    the kernel fills its pages with zeros, which costs more than many of the operations that use them.
    """
    mallopt = (
        getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    )
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
