"""Every option of a session is a flag, and only given flags become arguments."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
from absl import flags

import tpu_sync_rl as tsr
from tpu_sync_rl import flags as tsr_flags

NO_FLAGS = {"token", "like", "rename", "tls", "metrics"}
TLS_FLAGS = {f"tsr_tls_{field.name}" for field in dataclasses.fields(tsr.TLS)}


def parsed(*arguments):
    """The module's flags, as they are after `arguments`."""
    values = flags.FlagValues()
    for flag in flags.FLAGS.get_flags_for_module(tsr_flags):
        values[flag.name] = flag
    return values, values(["program", *arguments])


@pytest.fixture(autouse=True)
def unparse():
    yield
    for flag in flags.FLAGS.get_flags_for_module(tsr_flags):
        flag.unparse()


def test_options_of_sessions_and_flags_are_the_same():
    options = {
        name
        for connect in (tsr.connect_trainer, tsr.connect_sampler)
        for name in inspect.signature(connect).parameters
    }
    names = {flag.name for flag in flags.FLAGS.get_flags_for_module(tsr_flags)}
    assert names == {f"tsr_{name}" for name in options - NO_FLAGS} | TLS_FLAGS


def test_flags_that_were_not_given_leave_the_defaults():
    values, _ = parsed()
    assert tsr_flags.connect_options(tsr.connect_trainer, values) == {}


def test_given_flags_become_arguments_of_the_session_that_takes_them():
    values, rest = parsed(
        "--tsr_coordinator=10.0.0.2:8476",
        "--tsr_replica=sampler-3",
        "--tsr_nics=eth0,eth1",
        "--tsr_timeout=0",
        "--notsr_host_coordinator",
        "--tsr_cast",
    )
    assert rest == ["program"]
    both = {"coordinator": "10.0.0.2:8476", "nics": ["eth0", "eth1"], "timeout": 0.0}
    assert tsr_flags.connect_options(tsr.connect_trainer, values) == {
        **both,
        "host_coordinator": False,
    }
    assert tsr_flags.connect_options(tsr.connect_sampler, values) == {
        **both,
        "replica": "sampler-3",
        "cast": True,
    }


def test_flags_of_files_become_one_argument():
    values, _ = parsed("--tsr_tls_ca=ca.pem", "--tsr_tls_server_name=policy")
    for connect in (tsr.connect_trainer, tsr.connect_sampler):
        tls = tsr.TLS(ca="ca.pem", server_name="policy")
        assert tsr_flags.connect_options(connect, values) == {"tls": tls}


@pytest.mark.parametrize("argument", ["--tsr_same_host=rdma", "--tsr_streams_per_rail=0"])
def test_values_out_of_range_are_refused(argument):
    with pytest.raises(flags.IllegalFlagValueError, match=argument[2:]):
        parsed(argument)


def test_importing_the_package_defines_no_flags():
    program = "import sys, tpu_sync_rl; sys.exit('absl.flags' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
