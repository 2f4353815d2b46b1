"""Children are followed, and end with their launcher however that ends."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from tpu_sync_rl.child_programs import ChildFailedError, ChildPrograms

# Says its process id, and then waits for ever.
WAITING = """
import json, os, threading
from tpu_sync_rl.child_programs import end_with_stdin
end_with_stdin()
print(json.dumps({"pid": os.getpid()}), flush=True)
threading.Event().wait()
"""
# Starts such a child, passes its process id on, and follows it.
LAUNCHER = """
import os, pathlib, sys, time
from tpu_sync_rl.child_programs import ChildPrograms
with ChildPrograms(pathlib.Path(sys.argv[1])) as children:
    children.start("waiting", [sys.executable, "-c", sys.argv[2]], os.environ)
    for _, event in children.events(time.monotonic() + 60):
        print(event["pid"], flush=True)
"""


def deadline(timeout_s=60.0):
    return time.monotonic() + timeout_s


def start(children, name, program):
    children.start(name, [sys.executable, "-c", program], os.environ)


def test_events_come_from_json_lines_and_the_rest_goes_to_the_log(tmp_path):
    with ChildPrograms(tmp_path) as children:
        start(children, "a", """print('{"x": 1}'); print("words"); print("[1, 2]")""")
        assert list(children.events(deadline())) == [("a", {"x": 1})]
    assert (tmp_path / "a.log").read_text() == "words\n[1, 2]\n"


def test_children_may_be_started_on_an_event(tmp_path):
    with ChildPrograms(tmp_path) as children:
        start(children, "a", """print('{"x": 1}')""")
        names = []
        for name, _ in children.events(deadline()):
            names.append(name)
            if name == "a":
                start(children, "b", """print('{"x": 2}')""")
    assert names == ["a", "b"]


def test_failing_child_ends_the_others_and_its_error_is_told(tmp_path):
    with ChildPrograms(tmp_path) as children:
        start(children, "waiting", WAITING)
        start(children, "failing", "raise ValueError('bad luck')")
        with pytest.raises(
            ChildFailedError, match=r"(?s)failing failed with exit status 1.*ValueError: bad luck"
        ):
            list(children.events(deadline()))
    assert not running(children)


def test_child_that_a_signal_ended_is_told(tmp_path):
    with ChildPrograms(tmp_path) as children:
        start(children, "a", "import os; os.kill(os.getpid(), 9)")
        with pytest.raises(ChildFailedError, match="a was ended by SIGKILL"):
            list(children.events(deadline()))


def test_time_limit_ends_all_and_says_who_still_ran(tmp_path):
    with ChildPrograms(tmp_path) as children:
        start(children, "waiting", WAITING)
        with pytest.raises(ChildFailedError, match="time limit passed while waiting still ran"):
            list(children.events(deadline(0)))
    assert not running(children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_its_launcher(tmp_path, number):
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as launcher:
        child = os.pidfd_open(int(launcher.stdout.readline()))
        launcher.send_signal(number)
        ended, _, _ = select.select([child], [], [], 10)
        os.close(child)
    assert ended
    assert launcher.returncode != 0


def running(children):
    return [p for p in children._processes.values() if p.poll() is None]
