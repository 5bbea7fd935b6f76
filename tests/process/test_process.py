"""Devices, and what several processes exchange."""

import multiprocessing
import os

import pytest
import torch

from accelerated.training import process
from tests.helpers.programs import refusal

DEVICES = [  # (--device, how many GPUs there are, torchrun's LOCAL_RANK, the device or the refusal)
    ("cpu", 2, None, "cpu"),
    ("auto", 0, None, "cpu"),
    ("auto", 2, None, "cuda:0"),
    ("auto", 2, "1", "cuda:1"),
    ("cuda", 0, None, "--device cuda: torch finds no GPU here; use --device cpu or auto"),
    (
        "auto",
        2,
        "2",
        "torchrun started more than 2 processes here, torch finds 2 GPUs; start one for each",
    ),
]


@pytest.mark.parametrize("name,gpus,local_rank,expected", DEVICES)
def test_auto_takes_a_gpu_if_there_is_one_and_each_process_its_own(
    name, gpus, local_rank, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if expected.startswith(("cpu", "cuda:")):
        assert str(process.choose_device(name)) == expected
    else:
        assert refusal(process.choose_device, name) == expected


def average(rank, port, results):
    """Be one of two processes: of three parameters both, the second alone, none has a gradient."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (5,))]
    parameters[0].grad = torch.arange(6.0).view(2, 3) + rank
    if rank == 1:
        parameters[1].grad = torch.full((4,), 8.0)
    with process.connected(torch.device("cpu")):
        process.average_gradients(parameters, torch.device("cpu"))
    gradients = [parameter.grad for parameter in parameters]
    results.put((rank, [None if gradient is None else gradient.tolist() for gradient in gradients]))


def test_gradients_are_averaged_over_processes():
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    port = 20000 + os.getpid() % 20000
    workers = [context.Process(target=average, args=(rank, port, results)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    expected = [[[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]], [4.0] * 4, None]
    assert found == {0: expected, 1: expected}


@pytest.mark.parametrize("name,asked", [("WORLD_SIZE", "world_size"), ("RANK", "rank")])
@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5"])
def test_what_torchrun_sets_must_be_a_number(name, asked, value, monkeypatch):
    monkeypatch.setenv(name, value)
    expected = f"{name} is {value!r}, and torchrun sets a number; unset it"
    assert refusal(getattr(process, asked)) == expected
