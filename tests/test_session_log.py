"""The log: nothing that the library sets up, fields on every record, and no token."""

import logging
import subprocess
import sys

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
