"""Signals during work that can be saved."""

import os
import signal
import time

import pytest

from accelerated.program.interruption import STOPS, Interruption


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("told", [True, False])
def test_the_first_signal_asks_for_a_stop_a_second_stops_at_once_and_the_old_handlers_are_restored(number, told, capfd):
    """A closed terminal asks as Ctrl-C does."""
    before = [signal.getsignal(stop) for stop in STOPS]
    with Interruption(told) as interruption:
        assert interruption.signal is None
        os.kill(os.getpid(), number)
        assert interruption.signal == signal.Signals(number).name
        assert ("finishing this step and saving; again to stop now" in capfd.readouterr().err) is told
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert [signal.getsignal(stop) for stop in STOPS] == before


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
    with Interruption() as interruption:
        with interruption.leaves():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.signal == "SIGINT", "outside that block it only waits"


def test_what_nohup_started_goes_on_when_the_terminal_is_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)
