"""Devices, and errors of one of several processes; what they exchange: training/test_together."""

import pytest
import torch

from accelerated.program.errors import InputError
from accelerated.training import process
from tests.helpers.programs import refusal

DEVICES = [  # (--device, how many GPUs there are, torchrun's LOCAL_RANK, the device or the refusal)
    ("cpu", 2, None, "cpu"),
    ("auto", 0, None, "cpu"),
    ("auto", 2, None, "cuda:0"),
    ("auto", 2, "1", "cuda:1"),
    ("cuda", 0, None, "device cuda: torch finds none here; give cpu"),
    (
        "auto",
        2,
        "2",
        "GPU 2 is asked for, and torch finds 2, from 0 on; torchrun starts one process for each",
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


def test_an_error_of_the_first_process_lets_the_others_go_on(monkeypatch):
    """To raise the same one; else they would wait for a day."""
    waited = []
    monkeypatch.setattr(process, "wait_for_all", lambda: waited.append(True))
    with pytest.raises(InputError, match="no data"), process.rank_zero_first():
        raise InputError("no data")
    assert waited == [True]
