"""The process that trains: its device, its number among several, signals and memory. For train.py, run.py, eval.py and bench."""

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import sys
from collections.abc import Iterable, Iterator

import torch
import torch.distributed

from accelerated.errors import InputError

PATIENCE = datetime.timedelta(hours=24)  # others wait while the first process tokenises or validates
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
LARGEST_INT = 2**31 - 1


def choose_device(name: str) -> torch.device:
    """The torch device of --device, one for each process of torchrun; raises InputError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("--device cuda: torch finds no GPU here; use --device cpu or auto")
    if not available or name == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    if local >= torch.cuda.device_count():
        raise InputError(f"torchrun started {local + 1} processes or more here, torch finds {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", local)


def autocast(dtype: str, device: torch.device) -> torch.autocast:
    """The autocast context of --dtype: bfloat16 computes in it over float32 parameters, the others change nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process among them."""
    return int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Connect to the other processes, inside: by NCCL if they have GPUs, otherwise by gloo."""
    if world_size() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield
        wait_for_all()  # none leaves while another may still want to speak to it
    finally:
        gc.collect()  # what refers to the connection and outlives it can abort the process at its end
        torch.distributed.destroy_process_group()


def wait_for_all() -> None:
    """Wait until every process has come here."""
    if world_size() > 1:
        torch.distributed.barrier()


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """The first process runs what is inside before the others do; they do so too if it is refused, to refuse it as well."""
    if rank() > 0:
        wait_for_all()
    try:
        yield
    finally:
        if rank() == 0:
            wait_for_all()


def own_lanes(batch: int) -> slice:
    """The lanes of this process, a slice of all; raises InputError if they cannot be dealt evenly."""
    if batch % world_size():
        raise InputError(f"--batch {batch} cannot be dealt to {world_size()} processes evenly; give a multiple of {world_size()}")
    size = batch // world_size()
    return slice(rank() * size, (rank() + 1) * size)


def summed(values: list, device: torch.device) -> list:
    """The sums over all processes of a list of numbers."""
    if world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def all_lanes(state: tuple) -> tuple:
    """The state of all processes' lanes, in the lanes' order."""
    if world_size() == 1:
        return state

    def gathered(field):
        parts = [torch.empty_like(field) for _ in range(world_size())]
        torch.distributed.all_gather(parts, field.contiguous())
        return torch.cat(parts)

    return type(state)(*map(gathered, state))


def average_gradients(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> None:
    """Replace every gradient by its mean over all processes; a parameter that has none in any process keeps none."""
    if world_size() == 1:
        return
    parameters = list(parameters)
    users = summed([float(parameter.grad is not None) for parameter in parameters], device)
    used = [parameter for parameter, count in zip(parameters, users, strict=True) if count]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in used])
    torch.distributed.all_reduce(flat)
    for parameter, mean in zip(used, (flat / world_size()).split([p.numel() for p in used]), strict=True):
        parameter.grad = mean.view_as(parameter)


class Interruption:
    """Inside, SIGINT and SIGTERM only set `signal` to their name; a second one stops at once."""

    def __enter__(self):
        self.signal, self.before = None, {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        if self.signal:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


def keep_freed_memory() -> None:
    """Ask glibc to serve large blocks from its heap and never to trim it; does nothing if there is no glibc.

    A training step frees and allocates the same activations over and over. By default glibc maps each large block anew, and
    the kernel's zeroing of fresh pages then costs more than many of the operations that fill them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
