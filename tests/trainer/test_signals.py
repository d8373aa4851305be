"""A signal during a run is answered with a sentence that says how the run ends."""

import os
import signal

from hyper_parallel.trainer.signals import StopRequest


def test_the_first_signal_is_answered_once(capfd):
    stop = StopRequest()
    with stop.watched():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_requested
    assert capfd.readouterr().err == (
        "SIGTERM: the run ends; a step that has begun is finished and saved; a second signal ends it at once\n"
    )
