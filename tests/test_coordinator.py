"""The coordinator as a process: start and end, handshakes, bytes from strangers, liveness."""

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import chain

import grpc
import pytest
from streams import JOB, PATIENCE_S, TOKEN, SamplerSession, TrainerSession

from tpu_sync_rl import authentication, coordinator_server
from tpu_sync_rl import coordinator as coordinator_module
from tpu_sync_rl.addresses import split_address
from tpu_sync_rl.coordinator_process import start_coordinator
from tpu_sync_rl.coordinator_server import MAX_HANDSHAKE_NBYTES, CoordinatorServer
from tpu_sync_rl.errors import AuthError, SyncError, SyncTimeoutError
from tpu_sync_rl.greeting import Challenge, Credentials, Greeting, Proof, proofs
from tpu_sync_rl.long_messages import PIECE_NBYTES
from tpu_sync_rl.message_codec import (
    MAX_MANIFEST_NBYTES,
    MAX_REST_NBYTES,
    SESSION_METHOD,
    decode_from_coordinator,
    encode,
)
from tpu_sync_rl.messages import Refused, TrainerUp
from tpu_sync_rl.sampler_messages import JoinSampler, Latest, Refuse, SamplerJoined
from tpu_sync_rl.trainer_messages import Announced, PublishOutcome, TrainerJoined

PEER_TIMEOUT_S = 1.0


@pytest.fixture
def coordinator():
    process = start_coordinator(
        "127.0.0.1", 0, token=TOKEN, peer_timeout=PEER_TIMEOUT_S, insecure=False
    )
    yield process.address
    process.stop()


@contextmanager
def interpreter(code, *arguments):
    """A Python of its own, which finds what this one finds and ends with the block."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


# --- the process


def test_busy_address_is_an_error_that_says_so(coordinator):
    host, port = split_address(coordinator)
    with pytest.raises(SyncError, match=f"can't listen on {coordinator}: the address is in use"):
        start_coordinator(host, port, token=TOKEN, peer_timeout=10, insecure=False)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (64 * "x", r"'x*' is no name that resolves here \(.*\): check coordinator="),
        ("192.0.2.1", "192.0.2.1 is not an address of this machine"),
    ],
)
def test_host_that_it_can_not_listen_on_is_an_error_that_says_why(host, why):
    with pytest.raises(SyncError, match=f"can't listen on {host}:7: {why}"):
        start_coordinator(host, 7, token=TOKEN, peer_timeout=10, insecure=False)


def test_without_a_token_it_listens_on_loopback_only():
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 can be reached from other machines"):
        start_coordinator("0.0.0.0", 0, token=b"", peer_timeout=10, insecure=False)
    start_coordinator("127.0.0.1", 0, token=b"", peer_timeout=10, insecure=False).stop()
    start_coordinator("0.0.0.0", 0, token=b"", peer_timeout=10, insecure=True).stop()


def test_stop_frees_the_port_and_may_be_called_twice():
    first = start_coordinator("127.0.0.1", 0, token=TOKEN, peer_timeout=10, insecure=False)
    first.stop()
    first.stop()
    again = start_coordinator(
        *split_address(first.address), token=TOKEN, peer_timeout=10, insecure=False
    )
    assert again.address == first.address
    again.stop()


@pytest.mark.parametrize("stop", ["", "os.kill(process._process.pid, signal.SIGSTOP)"])
def test_it_ends_with_a_parent_that_is_killed(stop):
    code = (
        "import os, signal, time\n"
        "from tpu_sync_rl.coordinator_process import start_coordinator\n"
        "process = start_coordinator('127.0.0.1', 0, token=b'', peer_timeout=10, insecure=False)\n"
        f"{stop}\n"
        "print(process.address, flush=True)\n"
        "time.sleep(600)\n"
    )
    with interpreter(code) as parent:
        host, port = split_address(parent.stdout.readline().decode().strip())
        parent.kill()
        # The coordinator has the other end of the pipe too: it is at its end when both are gone.
        assert select.select([parent.stdout], [], [], PATIENCE_S)[0]
        assert parent.stdout.read() == b""
    start_coordinator(host, port, token=b"", peer_timeout=10, insecure=False).stop()


def test_it_runs_alone_without_jax():
    code = (
        "import sys, threading\n"
        "import tpu_sync_rl.coordinator as coordinator\n"
        "assert not {'jax', 'jaxlib', 'absl'} & sys.modules.keys()\n"
        "sys.exit(coordinator.main(['--address=127.0.0.1:0']))\n"
    )
    with interpreter(code) as alone:
        assert alone.stdout.readline().startswith(b"coordinator at 127.0.0.1:")
        alone.send_signal(signal.SIGINT)
        assert alone.wait(PATIENCE_S) == 0


def test_command_reports_what_is_wrong(tmp_path):
    command = [sys.executable, "-m", "tpu_sync_rl.coordinator", "--address"]
    for arguments, text in [
        (["0.0.0.0:0"], "TSR_TOKEN_FILE, .* or pass --insecure"),
        (["x"], "must be 'host:port'"),
        (["127.0.0.1:0", "--peer_timeout=inf"], "peer_timeout must be a number of seconds from 1"),
    ]:
        ran = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert ran.returncode == 1
        assert re.search(text, ran.stderr)


def test_help_is_for_people_alone(capsys):
    with pytest.raises(SystemExit, match="0"):
        coordinator_module.main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m tpu_sync_rl.coordinator [-h] --address ADDRESS")
    assert "TSR_TOKEN=… python -m tpu_sync_rl.coordinator --address=" in text
    assert "--ready_fd" not in text
    assert "--parent" not in text


def test_token_of_any_bytes_reaches_the_child():
    token = b"\xff\xfe secret \xc3"
    process = start_coordinator("127.0.0.1", 0, token=token, peer_timeout=10, insecure=False)
    try:
        with SamplerSession(process.address, token=token) as session:
            assert session.num_joins == 1
    finally:
        process.stop()


def test_child_that_does_not_listen_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SyncError, match="ended before it listened"):
        start_coordinator("127.0.0.1", 0, token=b"", peer_timeout=10, insecure=False)
    monkeypatch.undo()
    with pytest.raises(SyncTimeoutError, match="did not start in time"):
        start_coordinator(
            "127.0.0.1", 0, token=b"", peer_timeout=10, insecure=False, deadline=time.monotonic()
        )


def test_another_takes_the_place_of_one_that_is_killed(caplog):
    process = start_coordinator("127.0.0.1", 0, token=TOKEN, peer_timeout=10, insecure=False)
    try:
        with TrainerSession(process.address) as trainer, SamplerSession(process.address) as sampler:
            for number in (2, 3):
                os.kill(process._process.pid, signal.SIGKILL)
                trainer.wait_for(TrainerJoined, number)
                sampler.wait_for(SamplerJoined, number)
            trainer.publish()
            sampler.receive()
            decided = trainer.wait_for(PublishOutcome)
            assert decided.outcome.error == "" and decided.replicas["s"].version == 1
    finally:
        process.stop()
    told = [record for record in caplog.records if "started again" in record.getMessage()]
    assert [record.job for record in told] == ["policy"] * 2


def test_another_takes_the_place_of_one_that_is_stopped():
    process = start_coordinator("127.0.0.1", 0, token=TOKEN, peer_timeout=1, insecure=False)
    try:
        with SamplerSession(process.address) as sampler:
            os.kill(process._process.pid, signal.SIGSTOP)
            sampler.wait_for(SamplerJoined, 2)
    finally:
        process.stop()


# --- handshakes and strangers


def test_wrong_token_is_refused_at_once(coordinator):
    stranger = SamplerSession(coordinator, token=b"guess")
    with pytest.raises(AuthError, match="the coordinator has another token"):
        stranger.client.start(time.monotonic() + 60)


def test_missing_token_is_named_with_the_ways_to_give_one(coordinator):
    stranger = SamplerSession(coordinator, token=b"")
    text = "this process has no token: pass token= or set TSR_TOKEN or TSR_TOKEN_FILE"
    with pytest.raises(AuthError, match=text):
        stranger.client.start(time.monotonic() + 60)


class Raw:
    """A stream that says whatever a test wants."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.say = []
        self.said = []
        self.ready = threading.Semaphore(0)
        self.stream = self.channel.stream_stream(SESSION_METHOD)(self._messages(), timeout=20)
        self.messages = chain.from_iterable(map(decode_from_coordinator, self.stream))

    def _messages(self):
        while True:
            self.ready.acquire()
            data = self.say.pop(0)
            if data is None:
                return
            yield data

    def send(self, data):
        self.say.append(data)
        self.said.append(data)
        self.ready.release()

    def read(self):
        return next(self.messages)

    def read_all(self):
        return list(self.messages)

    def prove(self, token=TOKEN):
        greeting = Greeting("sampler", JOB, "raw", 0, authentication.new_nonce())
        self.send(encode(greeting))
        challenge = self.read()
        assert isinstance(challenge, Challenge)
        self.send(encode(Credentials(proofs(token, greeting, challenge)[0])))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.send(None)
        self.stream.cancel()
        self.channel.close()


GREETING = Greeting("sampler", JOB, "raw", 0, bytes(32))
JOIN = JoinSampler("life", 1, 0, [], None, None, 0, [])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "truncated"),
        (b"\x00garbage", "Expected `object`"),
        (bytes(MAX_HANDSHAKE_NBYTES + 1), f"message of {MAX_HANDSHAKE_NBYTES + 1} bytes"),
        (
            encode(JOIN),
            "a stream begins with the greeting",
        ),
        (encode(Greeting("spy", JOB, "raw", 0, bytes(32))), "a stream begins with the greeting"),
        (encode(Greeting("sampler", JOB, "raw", 0, b"short")), "a nonce has 32 bytes"),
        (None, "the stream ended within its handshake"),
    ],
)
def test_stranger_hears_nothing_but_a_refusal(coordinator, data, text):
    with Raw(coordinator) as raw:
        raw.send(data)
        [refused] = raw.read_all()
        assert isinstance(refused, Refused)
        assert text in refused.text


def test_coordinator_that_runs_alone_logs_who_comes_and_goes():
    command = [sys.executable, "-m", "tpu_sync_rl.coordinator", "--address=127.0.0.1:0"]
    alone = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TSR_TOKEN": TOKEN.decode()},
    )
    with alone:
        address = alone.stdout.readline().split()[-1]
        with SamplerSession(address):
            pass
        with TrainerSession(address) as trainer:
            trainer.client._stream.cancel()
            trainer.wait_until(lambda: trainer.num_joins == 2)
        alone.send_signal(signal.SIGINT)
        lines = [line.split(maxsplit=2)[2] for line in alone.stderr.read().splitlines()]
    assert lines[:4] == [
        "INFO policy, s[0]: joined",
        "INFO policy, s[0]: left",
        "INFO policy, trainer[0]: joined",
        "WARNING policy, trainer[0]: its connection ended without a goodbye",
    ]


def test_long_message_of_a_stranger_is_not_taken_in(coordinator):
    with Raw(coordinator) as raw:
        raw.send(bytes(PIECE_NBYTES + 1))
        with pytest.raises(grpc.RpcError, match="larger than max"):
            raw.read_all()


def test_long_message_of_a_peer_is_taken_in_pieces(coordinator):
    manifest = bytes(4 * PIECE_NBYTES)
    with TrainerSession(coordinator) as trainer, SamplerSession(coordinator) as sampler:
        trainer.publish(manifest=manifest)
        assert sampler.wait_for(TrainerUp).manifest == manifest


def test_manifest_of_a_peer_beyond_the_limit_is_refused_by_name(coordinator):
    with TrainerSession(coordinator) as trainer, SamplerSession(coordinator) as sampler:
        trainer.publish(manifest=bytes(MAX_MANIFEST_NBYTES + 1))
        trainer.wait_until(lambda: trainer.refusals)
        assert str(trainer.refusals[0]) == (
            "trainer 'A', process 0, sent a manifest of 67108865 bytes, 67108864 are the most"
        )
        assert not sampler.refusals


def test_message_of_a_peer_with_too_much_beside_its_manifest_is_refused_by_name(coordinator):
    with SamplerSession(coordinator) as sampler:
        sampler.client.send(Refuse("d", MAX_REST_NBYTES * "x"))
        sampler.wait_until(lambda: sampler.refusals)
        text = r"sampler 's', process 0, sent a message, beside its manifest, of \d+ bytes"
        assert re.match(text, str(sampler.refusals[0]))


def test_message_within_a_long_one_ends_the_stream(coordinator):
    with Raw(coordinator) as raw:
        raw.prove()
        assert isinstance(raw.read(), Proof)
        raw.send(b"\xc1begun")
        raw.send(encode(GREETING))
        [refused] = raw.read_all()
        assert "a message within a message" in refused.text


def test_proof_of_another_name_is_worth_nothing(coordinator):
    with Raw(coordinator) as raw:
        raw.send(encode(GREETING))
        nonces = (GREETING.nonce, raw.read().nonce)
        other = ("control", "sampler", JOB, "other", 0)
        raw.send(encode(Credentials(authentication.mac(TOKEN, "dialler", nonces, other))))
        assert [message.error for message in raw.read_all()] == ["AuthError"]


def test_replayed_credentials_are_refused(coordinator):
    with Raw(coordinator) as honest:
        honest.prove()
        assert isinstance(honest.read(), Proof)
        with Raw(coordinator) as stranger:
            for data in honest.said:
                stranger.send(data)
            assert isinstance(stranger.read(), Challenge)
            assert [message.error for message in stranger.read_all()] == ["AuthError"]


def test_coordinator_proves_itself_only_to_who_has_the_token(coordinator):
    with Raw(coordinator) as raw:
        raw.prove(token=b"guess")
        assert [type(message) for message in raw.read_all()] == [Refused]


@pytest.mark.parametrize("data", [b"", b"\x00garbage", encode(GREETING)])
def test_garbage_after_the_handshake_ends_that_stream_only(coordinator, data):
    with TrainerSession(coordinator) as trainer, SamplerSession(coordinator) as sampler:
        with Raw(coordinator) as raw:
            raw.prove()
            assert isinstance(raw.read(), Proof)
            raw.send(encode(JOIN))
            assert isinstance(raw.read(), SamplerJoined)
            raw.send(data)
            assert [message.error for message in raw.read_all()] == ["SyncError"]
        trainer.publish()
        sampler.receive()
        assert trainer.wait_for(PublishOutcome).outcome.error == ""
        assert trainer.num_joins == sampler.num_joins == 1


def test_what_there_is_to_say_at_one_moment_comes_together(coordinator):
    with TrainerSession(coordinator) as trainer, Raw(coordinator) as raw:
        trainer.publish()
        trainer.wait_for(PublishOutcome)
        raw.prove()
        assert isinstance(raw.read(), Proof)
        raw.send(encode(JOIN))
        together = decode_from_coordinator(next(raw.stream))
        assert [type(message) for message in together] == [SamplerJoined, TrainerUp, Latest]


def test_one_handshake_too_many_ends_the_oldest(monkeypatch):
    monkeypatch.setattr(coordinator_server, "MAX_HANDSHAKES", 2)
    with server_in_a_thread() as address, Raw(address) as oldest:
        oldest.send(encode(GREETING))
        assert isinstance(oldest.read(), Challenge)
        with Raw(address) as other, SamplerSession(address) as session:
            other.send(encode(GREETING))
            assert session.num_joins == 1
            with pytest.raises(grpc.RpcError, match="too many at once"):
                oldest.read_all()


def test_half_open_handshakes_are_bounded_in_time(monkeypatch):
    monkeypatch.setattr(coordinator_server, "HANDSHAKE_S", 0.2)
    with server_in_a_thread() as address, Raw(address) as raw:
        raw.send(encode(GREETING))
        with pytest.raises(grpc.RpcError, match=r"no handshake within 0\.2 s"):
            raw.read_all()


def test_connection_without_a_stream_is_ended(monkeypatch):
    monkeypatch.setattr(coordinator_server, "HANDSHAKE_S", 0.2)
    with (
        server_in_a_thread() as address,
        SamplerSession(address) as session,
        socket.create_connection(split_address(address), PATIENCE_S) as idle,
    ):
        idle.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        while idle.recv(4096):
            pass
        assert session.num_joins == 1


@contextmanager
def server_in_a_thread():
    """A coordinator in this process, where a test can reach it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start():
        server = CoordinatorServer(token=TOKEN, peer_timeout_s=10)
        return server, await server.start("127.0.0.1", 0)

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_S)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_stranger_without_grpc_harms_nobody(coordinator):
    with socket.create_connection(split_address(coordinator)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        with SamplerSession(coordinator) as session:
            assert session.num_joins == 1


CONNECTIONS = """
import contextlib, socket, sys
held = []
for index in range(2000):
    held.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
    with contextlib.suppress(OSError):
        held[-1].sendall((b"", b"GET / HTTP/1.1", b"PRI * HTTP/2.0")[index % 3])
print("connected", flush=True)
sys.stdin.read()
"""


def test_flood_of_connections_ends_no_stream_and_keeps_nobody_out(coordinator):
    with SamplerSession(coordinator) as early:
        with interpreter(CONNECTIONS, *map(str, split_address(coordinator))) as flood:
            assert flood.stdout.readline() == b"connected\n"
            with TrainerSession(coordinator) as late:
                late.publish()
                early.receive()
                assert late.wait_for(PublishOutcome).outcome.error == ""
        assert early.num_joins == 1


# --- liveness

SAMPLER = """
import ctypes, sys
from streams import SamplerSession
with SamplerSession(sys.argv[1]) as session:
    print("joined", flush=True)
    {}
    session.receive()
    sys.stdin.read()
"""


@contextmanager
def sampler_process(address, code):
    """A sampler in a process of its own, which joins and then runs `code`."""
    with interpreter(SAMPLER.format(code), address) as child:
        assert child.stdout.readline() == b"joined\n"
        yield child


def test_stopped_process_is_lost(coordinator):
    with TrainerSession(coordinator) as trainer, sampler_process(coordinator, "pass") as child:
        child.send_signal(signal.SIGSTOP)
        trainer.publish()
        assert trainer.wait_for(PublishOutcome).lost == ["s"]


def test_killed_process_is_lost(coordinator):
    receive_nothing = "sys.stdin.read()"
    with (
        TrainerSession(coordinator) as trainer,
        sampler_process(coordinator, receive_nothing) as child,
    ):
        trainer.publish()
        trainer.wait_for(Announced)
        child.kill()
        assert trainer.wait_for(PublishOutcome).lost == ["s"]


def test_process_that_holds_the_gil_is_alive(coordinator):
    hold = f"ctypes.PyDLL(None).usleep({int(3e6 * PEER_TIMEOUT_S)})"
    with TrainerSession(coordinator) as trainer, sampler_process(coordinator, hold):
        trainer.publish()
        decided = trainer.wait_for(PublishOutcome)
        assert decided.lost == []
        assert decided.replicas["s"].version == 1
