"""The process: its device, its number among several, signals and memory."""

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from accelerated.errors import InputError


def choose_device(name):
    """The torch device of --device, of its own for each process of torchrun; raises InputError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("--device cuda: torch finds no GPU here; use --device cpu or auto")
    if not available or name == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    if local >= torch.cuda.device_count():
        raise InputError(f"torchrun started {local + 1} processes or more here, torch finds {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", local)


def autocast(dtype, device):
    """The autocast context of --dtype: bfloat16 computes in it over float32 parameters, the others change nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")


PATIENCE = datetime.timedelta(hours=24)  # others wait while rank 0 tokenises or validates


def ranks():
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank():
    """The number of this process among them."""
    return int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def joined(device):
    """Connected to the other ranks inside: by NCCL where they have GPUs, by gloo otherwise."""
    if ranks() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield
        torch.distributed.barrier()  # none leaves while another may still want to speak to it
    finally:
        gc.collect()  # a DistributedDataParallel that outlives the connection aborts the process at its end
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def first_rank_first():
    """Rank 0 runs what is inside before the others do."""
    if ranks() > 1 and rank() > 0:
        torch.distributed.barrier()
    yield
    if ranks() > 1 and rank() == 0:
        torch.distributed.barrier()


def agreed(value):
    """The first rank's value."""
    if ranks() == 1:
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def wait_for_all():
    """Until every rank has come here."""
    if ranks() > 1:
        torch.distributed.barrier()


def own_lanes(batch):
    """The lanes of this rank, a slice of all; InputError where they cannot be dealt evenly."""
    if batch % ranks():
        raise InputError(f"--batch {batch} cannot be dealt to {ranks()} processes evenly; give a multiple of {ranks()}")
    size = batch // ranks()
    return slice(rank() * size, (rank() + 1) * size)


def summed(values, device):
    """The sums over all ranks of a list of numbers."""
    if ranks() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def all_lanes(state):
    """The states of all ranks' lanes, in the lanes' order."""
    if ranks() == 1:
        return state

    def gathered(field):
        parts = [torch.empty_like(field) for _ in range(ranks())]
        torch.distributed.all_gather(parts, field.contiguous())
        return torch.cat(parts)

    return type(state)(*map(gathered, state))


class Touch(torch.nn.Module):
    """Uses every parameter of a model without computing anything: 0, whose gradient is zero."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self):
        return sum(p.flatten()[:0].sum() for p in self.model.parameters())


class GradientAverage:
    """Averages the ranks' gradients, once per update, whatever made them.

    DistributedDataParallel reduces in the one backward pass that follows a forward of its own. Memory replay has a backward pass
    for every segment and calls more of the model than its forward, so all of them run outside; then a pass that only touches the
    parameters lets DistributedDataParallel average what they have gathered.
    """

    def __init__(self, model):
        self.model = model
        self.touch = DistributedDataParallel(Touch(model)) if ranks() > 1 else None

    def __call__(self, device):
        if self.touch is None:
            return
        parameters = list(self.model.parameters())
        used = summed([float(p.grad is not None) for p in parameters], device)
        self.touch().backward()
        for parameter, users in zip(parameters, used, strict=True):
            if not users:  # in no rank: the optimiser is to leave it alone, as with one process
                parameter.grad = None


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


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
LARGEST_INT = 2**31 - 1


def keep_freed_memory():
    """Ask glibc to serve large blocks from its heap and never to trim it; does nothing where there is no glibc.

    A training step frees and allocates the same activations over and over. By default glibc maps each large block anew, and
    the kernel's zeroing of fresh pages then costs more than many of the operations that fill them.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
