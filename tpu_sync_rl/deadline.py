"""Deadlines: moments on the clock of time.monotonic() by which a wait has to end."""

import threading
import time


def seconds_left(deadline: float) -> float:
    """Seconds until `deadline`: 0 where it has passed, and no more than a lock can wait for."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
