"""Signals during work that can be saved."""

import os
import signal
import time

import pytest

from accelerated.program.interruption import STOPS, Interruption


def test_a_second_signal_stops_at_once_and_the_old_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert interruption.signal is None
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.signal == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_signal_says_what_follows(capfd):
    for told in (True, False):
        with Interruption(told):
            os.kill(os.getpid(), signal.SIGTERM)
        assert ("finishing this step and saving; again to stop now" in capfd.readouterr().err) is told


def test_a_block_that_may_be_left_is_left_at_the_first_signal():
    done = []
    with Interruption() as interruption:
        with interruption.leaves():
            done.append("begun")
            os.kill(os.getpid(), signal.SIGINT)
            done.append("after the signal")
        assert interruption.signal == "SIGINT" and done == ["begun"]
        with pytest.raises(KeyboardInterrupt), interruption.leaves():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("after the second signal")
    assert done == ["begun"]


def test_a_signal_outside_that_block_only_waits():
    with Interruption() as interruption:
        with interruption.leaves():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.signal == "SIGINT"


@pytest.mark.parametrize("number", STOPS)
def test_a_closed_terminal_asks_for_a_stop_as_ctrl_c_does(number):
    with Interruption() as interruption:
        os.kill(os.getpid(), number)
        assert interruption.signal == signal.Signals(number).name


def test_what_nohup_started_goes_on_when_the_terminal_is_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)
