"""The log: nothing that the library sets up, fields on every record, and no token."""

import logging
import subprocess
import sys
import warnings

import pytest

import tpu_sync_rl as tsr
from tpu_sync_rl.session_log import SessionLog


def test_records_have_fields_and_say_the_same_in_their_text(caplog):
    caplog.set_level(logging.DEBUG, "tpu_sync_rl")
    SessionLog("policy", "sampler-0", 2).warning("100% gone", version=7)
    SessionLog("policy", None, 0).info("joined")
    SessionLog("policy", None, 0).debug("published", version=8)
    warning, info, debug = caplog.records
    fields = (warning.job, warning.replica, warning.process_index, warning.version)
    assert fields == ("policy", "sampler-0", 2, 7)
    assert warning.getMessage() == "policy, sampler-0[2], version 7: 100% gone"
    assert (info.replica, info.version, info.levelname) == (None, None, "INFO")
    assert info.getMessage() == "policy, trainer[0]: joined"
    assert (debug.levelname, debug.name) == ("DEBUG", "tpu_sync_rl")
    assert warning.filename == "test_session_log.py"


def test_nothing_is_printed_until_the_application_wants_it():
    code = """
import logging
from tpu_sync_rl.session_log import SessionLog
log = SessionLog("policy", None, 0)
log.warning("unheard")
logging.basicConfig(format="%(levelname)s %(job)s %(message)s")
log.warning("heard")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout + ran.stderr == "WARNING policy policy, trainer[0]: heard\n"


@pytest.mark.end_to_end
@pytest.mark.parametrize("agent", ["process", "colocated"])
def test_each_side_warns_once_of_a_tree_without_leaves(caplog, agent):
    with (
        tsr.connect_trainer(timeout=20, agent=agent) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like={"w": None}, timeout=20, agent=agent
        ) as sampler,
    ):
        for _ in range(2):
            tsr.sync_weights({"w": None}, to=trainer)
            assert sampler.sync_weights().params == {"w": None}
    warned = [record for record in caplog.records if "no leaves" in record.getMessage()]
    assert sorted(str(record.replica) for record in warned) == ["None", "s"]
    assert {record.levelname for record in warned} == {"WARNING"}


class RaisingHandler(logging.Handler):
    def emit(self, record):
        raise OSError("no log")


def test_handler_that_raises_is_warned_of_and_passed_over():
    logger, handler = logging.getLogger("tpu_sync_rl"), RaisingHandler()
    logger.addHandler(handler)
    try:
        with pytest.warns(RuntimeWarning, match="a handler of the log 'tpu_sync_rl' fails: OSErr"):
            SessionLog("policy", None, 0).warning("lost")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            SessionLog("policy", None, 0).warning("lost again")
    finally:
        logger.removeHandler(handler)
