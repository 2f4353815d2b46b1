"""TLS of the control streams: who is let in, and what is said to others."""

import dataclasses
import re
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import certificates
import jax.numpy as jnp
import numpy as np
import pytest
from certificates import Authority
from streams import JOB, PATIENCE_S, TOKEN, SamplerSession, TrainerSession

import tpu_sync_rl as tsr
from tpu_sync_rl.addresses import split_address
from tpu_sync_rl.coordinator_process import start_coordinator
from tpu_sync_rl.errors import AuthError, SyncTimeoutError
from tpu_sync_rl.tls import check_tls
from tpu_sync_rl.trainer_messages import PublishOutcome

pytestmark = certificates.needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(authority):
    return authority.issue("server")


@contextmanager
def coordinator(tls):
    process = start_coordinator(
        "127.0.0.1", 0, token=TOKEN, peer_timeout=10, insecure=False, tls=tls
    )
    try:
        yield process.address
    finally:
        process.stop()


def without_ca(tls):
    return dataclasses.replace(tls, ca=None)


def start(address, tls, **arguments):
    """Joins as a sampler and leaves again; raises what the start raises."""
    session = SamplerSession(address, tls=tls, **arguments)
    try:
        session.client.start(time.monotonic() + PATIENCE_S)
    finally:
        session.client.close()


def test_versions_go_through_encrypted_streams(authority, server):
    with (
        coordinator(without_ca(server)) as address,
        TrainerSession(address, tls=server) as trainer,
        SamplerSession(address, tls=tsr.TLS(ca=authority.ca)) as sampler,
    ):
        trainer.publish()
        sampler.receive()
        assert trainer.wait_for(PublishOutcome).outcome.error == ""


def test_token_is_proved_within(server):
    with (
        coordinator(without_ca(server)) as address,
        pytest.raises(AuthError, match="the coordinator has another token"),
    ):
        start(address, server, token=b"guess")


def test_own_certificate_is_trusted_where_there_is_no_ca(server):
    with coordinator(without_ca(server)) as address:
        start(address, without_ca(server))


@pytest.mark.parametrize("name", ["other authority", "system's authorities"])
def test_coordinator_that_nobody_vouches_for_is_refused_at_once(server, tmp_path, name):
    stranger = tsr.TLS(ca=Authority(tmp_path).ca) if name == "other authority" else tsr.TLS()
    with (
        coordinator(without_ca(server)) as address,
        pytest.raises(AuthError, match=f"{address} and tls=: .*CERTIFICATE_VERIFY_FAILED"),
    ):
        start(address, stranger)


def test_name_of_a_certificate_counts(authority):
    named = authority.issue("named", "DNS:policy")
    with coordinator(without_ca(named)) as address:
        with pytest.raises(AuthError, match="Hostname Verification Check failed"):
            start(address, tsr.TLS(ca=authority.ca))
        start(address, tsr.TLS(ca=authority.ca, server_name="policy"))


def test_coordinator_with_a_ca_asks_for_a_certificate(authority, server, tmp_path):
    stranger = dataclasses.replace(Authority(tmp_path).issue("stranger"), ca=authority.ca)
    with coordinator(server) as address:
        start(address, authority.issue("client", "DNS:client"))
        for tls in (tsr.TLS(ca=authority.ca), stranger):
            session = SamplerSession(address, tls=tls)
            with pytest.raises(SyncTimeoutError, match=r"does it want .* with a certificate"):
                session.client.start(time.monotonic() + 1)


def test_plain_client_of_a_coordinator_with_tls_hears_what_may_be_missing(server):
    with coordinator(without_ca(server)) as address:
        session = SamplerSession(address)
        with pytest.raises(SyncTimeoutError, match="does it want tls="):
            session.client.start(time.monotonic() + 1)


def test_plain_coordinator_is_refused_at_once(server):
    with (
        coordinator(None) as address,
        pytest.raises(AuthError, match=r"and tls=: .*WRONG_VERSION_NUMBER"),
    ):
        start(address, server)


def test_renewed_certificate_is_used_by_the_next_stream(tmp_path):
    authority = Authority(tmp_path)
    server, client = authority.issue("server"), authority.issue("client")
    with coordinator(server) as address, SamplerSession(address, tls=client) as session:
        client.key.unlink()
        session.client._stream.cancel()
        session.wait_until(lambda: session.num_joins == 2)
        authority.issue("client")
        session.client._stream.cancel()
        session.wait_until(lambda: session.num_joins == 3)


def test_sessions_take_certificates(authority, server):
    options = {"job": JOB, "token": "secret", "timeout": 60}
    params = {"w": jnp.arange(4.0)}
    with (
        tsr.connect_trainer(**options, tls=server) as trainer,
        tsr.connect_sampler(
            **options,
            coordinator=trainer.coordinator,
            replica="s",
            like=params,
            tls=authority.issue("sampler", "DNS:sampler"),
        ) as sampler,
    ):
        trainer.sync_weights(params)
        np.testing.assert_array_equal(sampler.sync_weights().params["w"], params["w"])


class Tap:
    """Passes one connection on to `address`, and keeps what crosses it, both ways together."""

    def __init__(self, address):
        self.heard = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(split_address(address),))
        self._thread.start()

    def _run(self, address):
        client, _ = self._server.accept()
        with self._server, client, socket.create_connection(address) as server:
            ends = {client: server, server: client}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    self.heard += data
                    ends[end].sendall(data)

    def join(self):
        self._thread.join()
        return self.heard


@pytest.mark.parametrize("encrypted", [False, True])
def test_token_never_crosses_the_wire_and_nothing_is_readable_with_tls(server, encrypted):
    tls = without_ca(server) if encrypted else None
    with coordinator(tls) as address:
        tap = Tap(address)
        start(tap.address, tls)
        heard = tap.join()
    assert TOKEN not in heard
    assert (b"Greeting" in heard) == (not encrypted)


# --- files


def test_coordinator_that_runs_alone_takes_files(authority, server):
    command = [sys.executable, "-m", "tpu_sync_rl.coordinator", "--address=127.0.0.1:0"]
    files = [f"--tls_certificate={server.certificate}", f"--tls_key={server.key}"]
    with subprocess.Popen([*command, *files], stdout=subprocess.PIPE, text=True) as alone:
        address = alone.stdout.readline().split()[-1]
        start(address, tsr.TLS(ca=authority.ca), token=b"")
        alone.terminate()
    ran = subprocess.run([*command, files[0]], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "tls: certificate and key go together" in ran.stderr


def test_host_of_the_coordinator_needs_a_certificate(authority):
    with pytest.raises(ValueError, match="tls: who hosts the coordinator needs its certificate="):
        tsr.connect_trainer(tls=tsr.TLS(ca=authority.ca))


@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
def test_missing_file_is_named(server, tmp_path, name):
    path = tmp_path / "none.pem"
    with pytest.raises(ValueError, match=f"tls: {re.escape(str(path))}: No such file"):
        check_tls(dataclasses.replace(server, **{name: path}))


def test_file_of_another_kind_is_named(authority, server, tmp_path):
    with pytest.raises(ValueError, match=r"tls: ca=.*server\.key holds no certificate"):
        check_tls(tsr.TLS(ca=server.key))
    other = authority.issue("other")
    with pytest.raises(ValueError, match=r"tls: key=.*other\.key is no key, without a password"):
        check_tls(dataclasses.replace(server, key=other.key))
    locked = tmp_path / "locked.key"
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", server.key, "-out", locked]
    subprocess.run(encrypt, check=True, capture_output=True)
    with pytest.raises(ValueError, match=r"tls: key=.*locked\.key is no key, without a password"):
        check_tls(dataclasses.replace(server, key=locked))


def test_other_things_than_tls_are_refused():
    with pytest.raises(TypeError, match=r"tls must be a tpu_sync_rl\.TLS, not True"):
        tsr.connect_trainer(tls=True)
