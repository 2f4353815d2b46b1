"""Addresses of coordinators as users write them: one rule for every side and command line."""

import json

import jax.numpy as jnp
import pytest
from absl import app, flags

import tpu_sync_rl as tsr
from tpu_sync_rl import coordinator as coordinator_command
from tpu_sync_rl import launch
from tpu_sync_rl.addresses import (
    check_exposure,
    is_loopback,
    join_address,
    port_after,
    split_address,
)
from tpu_sync_rl.doctor import __main__ as doctor
from tpu_sync_rl.examples.rollouts import RolloutServer, submit_rollouts
from tpu_sync_rl.flags import AddressParser

FORM = r"must be 'host:port', such as '10\.0\.0\.2:8476' or '\[fd00::2\]:8476', not "

# What users write, and what they are told.
BAD = [
    (None, "None$"),
    (b"10.0.0.2:80", "b'10.0.0.2:80'$"),
    ("", "'': it lacks the port"),
    ("host", "'host': it lacks the port"),
    ("host:", "it lacks the port"),
    (":80", "it lacks the host"),
    ("host:port", "'port' is no port"),
    ("host:-1", "'-1' is no port"),
    ("host:٣", "is no port"),
    ("127.0.0.1:99999", "'127.0.0.1:99999': port 99999 is out of range, 65535 is the last"),
    ("127.0.0.1:" + "9" * 5000, "port 999999999999 is out of range"),
    ("http://10.0.0.2:80", "leave 'http://' out"),
    ("grpc://10.0.0.2:80", "leave 'grpc://' out"),
    ("10.0.0.2:80/", "'80/' is no port"),
    (" 10.0.0.2:80", "it has white space in it"),
    ("10.0.0.2:80\n", "it has white space in it"),
    ("10.0.0.300:80", "'10.0.0.300' is neither an address nor a name of a host"),
    ("user@host:80", "'user@host' is neither"),
    ("-host:80", "'-host' is neither"),
    ("::1", r"it lacks the port, as in '\[::1\]:8476'"),
    ("2001:db8:0:0:0:0:0:1", r"as in '\[2001:db8:0:0:0:0:0:1\]:8476'"),
    ("a:b:80", "'a:b' is no IPv6 address"),
    ("dns:host:80", "'dns:host' is no IPv6 address"),
    ("[::1]", "it lacks the port"),
    ("[::1]:", "it lacks the port"),
    ("[::1]80", "it lacks the port"),
    ("[::1:80", "brackets are for an IPv6 address"),
    ("[10.0.0.2]:80", "brackets are for an IPv6 address"),
    ("[host]:80", "brackets are for an IPv6 address"),
    ("[fe80::1%eth0]:80", "a link-local address is known on one link alone: take a global one"),
    ("fe80::1%eth0:80", "a link-local address"),
    ("[fe80::1]:80", "a link-local address"),
    ("[fd00::2%eth0]:80", "leave '%eth0' out"),
]


@pytest.mark.parametrize(("address", "text"), BAD)
def test_bad_address_is_told_what_is_wrong_and_how_it_looks(address, text):
    with pytest.raises(ValueError, match=f"--address {FORM}.*{text}"):
        split_address(address, "--address")


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.2:8476", "10.0.0.2", 8476),
        ("[::1]:0", "::1", 0),
        ("::1:8476", "::1", 8476),
        ("[FD00:0::2]:65535", "fd00::2", 65535),
        ("[::ffff:10.0.0.2]:080", "10.0.0.2", 80),
        ("Trainer-0.Policy_1.svc:80", "trainer-0.policy_1.svc", 80),
        ("localhost.:80", "localhost.", 80),
        ("0.0.0.0:80", "0.0.0.0", 80),
    ],
)
def test_addresses_are_split_and_joined(address, host, port):
    assert split_address(address) == (host, port)
    assert split_address(join_address(host, port)) == (host, port)


def test_nobody_dials_port_0():
    with pytest.raises(ValueError, match="port 0 is a free one for who listens: dial the one"):
        split_address("127.0.0.1:0", dialled=True)


def test_loopback_is_known_however_it_is_written():
    here = ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost", "LocalHost.")
    assert all(is_loopback(host) for host in here)
    assert not any(is_loopback(x) for x in ("10.0.0.1", "h", "::", "0.0.0.0", "::ffff:10.0.0.1"))
    check_exposure("localhost", token=b"", insecure=False)
    with pytest.raises(ValueError, match=r"10\.0\.0\.1 can be reached from other machines"):
        check_exposure("10.0.0.1", token=b"", insecure=False)


def test_port_after_a_free_one_is_free():
    assert [port_after(port) for port in (0, 1, 65534)] == [0, 2, 65535]
    with pytest.raises(ValueError, match="no port after 65535"):
        port_after(65535)


@pytest.mark.parametrize("address", ["::1", "http://h:1", "[fe80::1%eth0]:1", "", "h:1 "])
def test_every_side_and_command_line_says_the_same_at_once(address, capsys, tmp_path):
    like = {"w": jnp.zeros(4)}
    refused = pytest.raises(ValueError, match=FORM)
    with refused:
        tsr.connect_trainer(coordinator=address)
    with refused:
        tsr.connect_trainer(coordinator=address, host_coordinator=False)
    with refused:
        tsr.connect_sampler(coordinator=address, replica="s", like=like)
    with refused:
        tsr.connect_sampler(coordinator=address, replica="s", like=like, agent="colocated")
    with refused:
        AddressParser().parse(address)
    with refused:
        RolloutServer(address, b"token")
    with refused:
        submit_rollouts(address, b"token", None, 1)
    assert coordinator_command.main([f"--address={address}"]) == 1
    with pytest.raises(SystemExit, match="2"):
        doctor.main([f"--coordinator={address}"])
    assert capsys.readouterr().err.count("must be 'host:port', such as") == 2
    config = tmp_path / "config.toml"
    config.write_text(f"coordinator = {json.dumps(address)}\n")
    with pytest.raises(app.UsageError, match=FORM):
        launch.apply_config(config, flags.FLAGS)


def test_a_sampler_needs_an_address():
    with pytest.raises(ValueError, match=f"coordinator {FORM}None"):
        tsr.connect_sampler(coordinator=None, replica="s", like={})


def test_both_sides_take_ipv6_without_brackets():
    params = {"w": jnp.arange(4)}
    with tsr.connect_trainer(coordinator="::1:0") as trainer:
        host, port = split_address(trainer.coordinator)
        assert trainer.coordinator == f"[::1]:{port}"
        with tsr.connect_sampler(coordinator=f"{host}:{port}", replica="s", like=params) as sampler:
            trainer.sync_weights(params)
            assert sampler.sync_weights().version == 1
