from pathlib import Path

import pytest

from tpu_sync_rl.options import Options, checked_timeout

GOOD = {
    "job": "policy",
    "token": None,
    "timeout": 600.0,
    "nics": None,
    "streams_per_rail": 2,
    "chunk_nbytes": 1 << 20,
    "congestion": None,
    "peer_timeout": 10.0,
    "same_host": "auto",
    "verify": "wire",
    "insecure": False,
    "trace": None,
    "tls": None,
    "metrics": None,
}


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("TSR_TOKEN", raising=False)
    monkeypatch.delenv("TSR_TOKEN_FILE", raising=False)


@pytest.mark.parametrize(
    "option, value, error, message",
    [
        ("job", "", ValueError, "job must be a name"),
        ("nics", "eth0", TypeError, "nics must be a sequence"),
        ("nics", [3], TypeError, "nics must be a sequence of names or addresses, not \\[3\\]"),
        ("nics", [], ValueError, "nics must name one NIC or more"),
        ("congestion", 3, TypeError, "congestion must be a name, not 3"),
        ("streams_per_rail", 0, ValueError, "streams_per_rail must be an int from 1 to 64, not 0"),
        ("streams_per_rail", True, TypeError, "streams_per_rail must be an int"),
        ("chunk_nbytes", 1000, ValueError, "chunk_nbytes must be an int from 4096"),
        (
            "peer_timeout",
            0.5,
            ValueError,
            "peer_timeout must be a number of seconds from 1 to 86400, not 0.5",
        ),
        ("peer_timeout", float("inf"), ValueError, "from 1 to 86400, not inf"),
        ("same_host", "shm", ValueError, "same_host must be 'auto' or 'tcp', not 'shm'"),
        (
            "verify",
            "half",
            ValueError,
            "verify must be 'off' or 'wire' or 'full', not 'half'",
        ),
        ("timeout", -1, ValueError, "timeout must be a number of seconds, 0 or more, not -1"),
        ("timeout", float("nan"), ValueError, "timeout must be a number"),
        ("timeout", "5", ValueError, "timeout must be a number of seconds, 0 or more, not '5'"),
        ("token", "", ValueError, "the token is empty"),
    ],
)
def test_bad_option_is_named(option, value, error, message):
    with pytest.raises(error, match=message):
        Options.checked(**{**GOOD, option: value})


def test_unknown_congestion_control_is_named():
    with pytest.raises(ValueError, match="congestion='no-such' can't be used here"):
        Options.checked(**{**GOOD, "congestion": "no-such"})


def test_good_options_pass(tmp_path: Path):
    options = Options.checked(**{**GOOD, "nics": ["lo"], "trace": tmp_path / "t", "token": "s"})
    assert options.nics == ("lo",) and options.token == b"s" and options.timeout_s == 600.0


def test_call_without_a_timeout_takes_the_sessions():
    assert checked_timeout(None, 3.0) == 3.0
