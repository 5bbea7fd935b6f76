"""Devices, and what several processes exchange."""

import multiprocessing
import os

import torch

from accelerated.program.errors import InputError
from accelerated.training import process


def test_auto_takes_a_gpu_if_there_is_one_and_each_process_its_own(monkeypatch):
    def found(name, gpus, local_rank):
        for call, answer in (("is_available", gpus > 0), ("current_device", 0), ("device_count", gpus)):
            monkeypatch.setattr(torch.cuda, call, lambda answer=answer: answer)
        monkeypatch.setenv("LOCAL_RANK", local_rank) if local_rank else monkeypatch.delenv("LOCAL_RANK", raising=False)
        try:
            return str(process.choose_device(name))
        except InputError as error:
            return str(error)

    for given, device in (
        (("cpu", 2, None), "cpu"),
        (("auto", 0, None), "cpu"),
        (("auto", 2, None), "cuda:0"),
        (("cuda", 2, None), "cuda:0"),
        (("auto", 2, "1"), "cuda:1"),
    ):
        assert found(*given) == device
    assert found("cuda", 0, None) == "--device cuda: torch finds no GPU here; use --device cpu or auto"
    for name, gpus, local_rank in (("auto", 2, "2"), ("cuda", 2, "5"), ("cuda", 1, "1")):
        message = f"torchrun started more than {local_rank} processes here, torch finds {gpus} GPUs; start one for each"
        assert found(name, gpus, local_rank) == message


def test_the_memory_that_a_gpu_took_is_said(monkeypatch):
    for kind, size in (("allocated", 41.23e9), ("reserved", 47e9)):
        monkeypatch.setattr(torch.cuda, f"max_memory_{kind}", lambda device, size=size: size)
    line = process.peak_memory(torch.device("cuda", 1))
    assert line == "peak memory on cuda:1: 41.2 GB in tensors, 47.0 GB reserved"
    assert process.peak_memory(torch.device("cpu")) is None


def average(rank, port, results):
    """Run one of two processes; three parameters have a gradient in both, in the second alone, in neither."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (5,))]
    parameters[0].grad = torch.arange(6.0).view(2, 3) + rank
    if rank:
        parameters[1].grad = torch.full((4,), 8.0)
    with process.connected(torch.device("cpu")):
        process.average_gradients(parameters, torch.device("cpu"))
    results.put((rank, [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]))


def test_gradients_are_averaged_over_processes():
    context = multiprocessing.get_context("fork")
    results, port = context.Queue(), 20000 + os.getpid() % 20000
    workers = [context.Process(target=average, args=(rank, port, results)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    expected = [[[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]], [4.0] * 4, None]
    assert found == {0: expected, 1: expected}
