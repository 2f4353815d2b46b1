from pathlib import Path

import pytest

from tpu_sync_rl.options import (
    Options,
    checked_timeout,
    is_loopback,
    resolve_token,
    split_address,
)

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


def test_token_comes_from_argument_then_environment_then_file(monkeypatch, tmp_path):
    assert resolve_token(None) == b""
    file = tmp_path / "token"
    file.write_text("from file\n")
    monkeypatch.setenv("TSR_TOKEN_FILE", str(file))
    assert resolve_token(None) == b"from file"
    monkeypatch.setenv("TSR_TOKEN", "from environment")
    assert resolve_token(None) == b"from environment"
    assert resolve_token("from argument") == b"from argument"


def test_token_that_no_environment_can_hold_is_refused():
    with pytest.raises(ValueError, match="NUL byte"):
        resolve_token(b"a\0b")


def test_token_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="token must be a str or bytes, not a int"):
        resolve_token(5)


def test_missing_token_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TSR_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"TSR_TOKEN_FILE=.*none: No such file"):
        resolve_token(None)


@pytest.mark.parametrize("address", ["host", ":80", "host:", "host:port", "host:-1"])
def test_bad_address_is_refused(address):
    with pytest.raises(ValueError, match="coordinator must be 'host:port'"):
        split_address(address)


def test_port_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"'127\.0\.0\.1:99999': port 99999 is out of range"):
        split_address("127.0.0.1:99999")


def test_addresses_are_split():
    assert split_address("10.0.0.2:8476") == ("10.0.0.2", 8476)
    assert split_address("[::1]:0") == ("::1", 0)
    assert [is_loopback(x) for x in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "h")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert checked_timeout(None, 3.0) == 3.0
