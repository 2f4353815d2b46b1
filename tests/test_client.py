"""A client's stream: dialling, proofs on both sides, redialling, the end."""

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from grpc._cython import cygrpc
from streams import PATIENCE_S, TOKEN, SamplerSession, TrainerSession

from tpu_sync_rl import authentication
from tpu_sync_rl.addresses import split_address
from tpu_sync_rl.coordinator_process import start_coordinator
from tpu_sync_rl.errors import AuthError, SyncError, SyncTimeoutError, VersionError
from tpu_sync_rl.greeting import Challenge, Proof, proofs
from tpu_sync_rl.message_codec import (
    SESSION_METHOD,
    decode_to_coordinator,
    encode_together,
)
from tpu_sync_rl.messages import Leave, Refused
from tpu_sync_rl.trainer_messages import GiveUp, JoinTrainer, TrainerJoined


@contextmanager
def coordinator(port=0):
    process = start_coordinator("127.0.0.1", port, token=TOKEN, peer_timeout=10, insecure=False)
    try:
        yield process.address
    finally:
        process.stop()


@contextmanager
def pretender(serve):
    """A server of streams that are served by `serve(messages)`, a generator of answers."""
    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(lambda messages, _: serve(messages))
    service, method = SESSION_METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def proved(messages, token=TOKEN):
    """The coordinator's side of a handshake."""
    greeting = decode_to_coordinator(next(messages))
    challenge = Challenge(authentication.new_nonce())
    yield encode_together([challenge])
    next(messages)
    yield encode_together([Proof(proofs(token, greeting, challenge)[1])])


# --- start


def test_nobody_at_the_address_is_a_timeout_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    session = TrainerSession(address)
    with pytest.raises(SyncTimeoutError, match=f"coordinator {address}: unavailable: .*refused"):
        session.client.start(time.monotonic() + 0.5)


def test_who_listens_and_says_nothing_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SyncTimeoutError, match=f"{address}: no answer yet"):
            TrainerSession(address).client.start(time.monotonic() + 0.5)


def test_start_dials_until_the_coordinator_is_there():
    with coordinator() as address:
        pass
    session = TrainerSession(address)
    starter = threading.Thread(target=session.client.start, args=(time.monotonic() + PATIENCE_S,))
    starter.start()
    while "refused" not in session.client.state:
        starter.join(0.01)
    with coordinator(split_address(address)[1]):
        starter.join()
        assert session.num_joins == 1
        session.client.close()


def test_server_that_can_not_prove_the_token_is_refused_at_once():
    with pretender(lambda messages: proved(messages, b"guess")) as address:
        session = TrainerSession(address)
        with pytest.raises(AuthError, match=f"the coordinator at {address} does not have our"):
            session.client.start(time.monotonic() + PATIENCE_S)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"garbage", "does not speak our protocol"),
        (encode_together([Challenge(b"short")]), "a nonce of 5 bytes"),
        (encode_together([TrainerJoined(1)]), "TrainerJoined in place of Challenge"),
    ],
)
def test_server_of_another_kind_is_named(answer, text):
    with pretender(lambda messages: iter([answer])) as address:
        session = TrainerSession(address)
        with pytest.raises(SyncTimeoutError, match=text):
            session.client.start(time.monotonic() + 0.5)


def test_refused_join_raises_what_the_coordinator_names():
    with coordinator() as address, TrainerSession(address, "A") as old:
        with TrainerSession(address, "B"):
            old.wait_until(lambda: old.refusals)
        again = TrainerSession(address, "A")
        with pytest.raises(VersionError, match="newer incarnation of the trainer has taken over"):
            again.client.start(time.monotonic() + PATIENCE_S)


def test_ctrl_c_ends_start():
    code = (
        "import time\n"
        "from streams import TrainerSession\n"
        "print('dials', flush=True)\n"
        "TrainerSession('127.0.0.1:1').client.start(time.monotonic() + 600)\n"
    )
    child = python(code)
    assert child.stdout.readline() == b"dials\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=PATIENCE_S)
    assert b"KeyboardInterrupt" in errors


# --- the stream


def test_broken_stream_is_joined_again_with_what_the_session_holds():
    with coordinator() as address:
        session = TrainerSession(address)
        session.client.start(time.monotonic() + PATIENCE_S)
    with coordinator(split_address(address)[1]):
        session.wait_until(lambda: session.num_joins == 2)
        assert session.all(TrainerJoined)[1].epoch == session.all(TrainerJoined)[0].epoch
        session.client.close()


def test_what_is_sent_while_the_join_is_made_follows_it():
    received = []

    def serve(messages):
        yield from proved(messages)
        received.append(decode_to_coordinator(next(messages)))
        yield encode_together([TrainerJoined(1)])
        received.extend(decode_to_coordinator(data) for data in messages)

    class Busy(TrainerSession):
        def join(self):
            self.client.send(GiveUp(7))
            return super().join()

    with pretender(serve) as address:
        session = Busy(address)
        session.client.send(GiveUp(1))  # before there is a stream: dropped
        with session:
            session.client.send(GiveUp(8))
        assert [type(m) for m in received] == [JoinTrainer, GiveUp, GiveUp, Leave]
        assert [m.call for m in received[1:3]] == [7, 8]


def test_client_without_a_thread_for_its_stream_dials_again(monkeypatch):
    refused = iter(range(2))

    class Threads(cygrpc.ForkManagedThread):
        def start(self):
            if next(refused, None) is not None:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(cygrpc, "ForkManagedThread", Threads)
    with coordinator() as address, TrainerSession(address) as session:
        session.wait_for(TrainerJoined)
    assert next(refused, None) is None


def test_refusal_after_start_comes_once_and_ends_the_client():
    with coordinator() as address, TrainerSession(address, "A") as old:
        with TrainerSession(address, "B") as new:
            old.wait_until(lambda: old.refusals)
            assert "newer incarnation" in old.client.state
            new.publish()
            new.wait_until(lambda: len(new.heard) > 1)
        assert [type(error) for error in old.refusals] == [VersionError]
        assert old.num_joins == 1


def test_finished_client_does_not_dial_again():
    num_streams = []

    def serve(messages):
        num_streams.append(1)
        yield from proved(messages)
        next(messages)
        yield encode_together([TrainerJoined(1)])

    class Finished(TrainerSession):
        def on_message(self, message):
            self.client.finish()
            super().on_message(message)

    with pretender(serve) as address, Finished(address) as session:
        session.client._thread.join(PATIENCE_S)
        assert not session.client._thread.is_alive()
        assert len(num_streams) == 1
        assert not session.refusals


def test_error_in_a_callback_reaches_the_session():
    class Broken(TrainerSession):
        def on_message(self, message):
            super().on_message(message)
            if not isinstance(message, TrainerJoined):
                raise KeyError("no such call")

    with coordinator() as address, Broken(address) as session:
        session.publish()
        session.wait_until(lambda: session.refusals)
        assert type(session.refusals[0]) is SyncError
        assert "KeyError: 'no such call'" in str(session.refusals[0])


# --- the end


def test_close_says_goodbye_after_all_that_was_sent_and_ends_the_thread():
    received = []

    def serve(messages):
        yield from proved(messages)
        next(messages)
        yield encode_together([TrainerJoined(1)])
        received.extend(decode_to_coordinator(data) for data in messages)

    with pretender(serve) as address:
        session = TrainerSession(address)
        with session:
            for call in range(100):
                session.client.send(GiveUp(call))
        session.client.close()
        assert received == [*(GiveUp(call) for call in range(100)), Leave()]
        assert not session.client._thread.is_alive()


def test_close_from_a_callback_does_not_wait_for_itself():
    class Closing(TrainerSession):
        def on_refused(self, error):
            self.client.close()
            super().on_refused(error)

    with coordinator() as address, Closing(address, "A") as old, TrainerSession(address, "B"):
        old.wait_until(lambda: old.refusals)
        old.client._thread.join(PATIENCE_S)
        assert not old.client._thread.is_alive()


def test_close_ends_a_client_whose_server_hangs():
    hold = threading.Event()

    def serve(messages):
        yield from proved(messages)
        next(messages)
        yield encode_together([TrainerJoined(1)])
        hold.wait(PATIENCE_S)

    with pretender(serve) as address:
        session = TrainerSession(address)
        with session:
            pass
        assert not session.client._thread.is_alive()
        hold.set()


def test_refused_last_word_of_a_server_is_read_before_its_end():
    def serve(messages):
        yield from proved(messages)
        next(messages)
        yield encode_together([TrainerJoined(1)])
        yield encode_together([Refused("VersionError", "replaced")])

    with pretender(serve) as address, TrainerSession(address) as session:
        session.wait_until(lambda: session.refusals)
        assert str(session.refusals[0]) == "replaced"


def test_interpreter_ends_with_an_open_client():
    code = (
        "import sys, time\n"
        "from streams import TrainerSession\n"
        "session = TrainerSession(sys.argv[1])\n"
        "session.client.start(time.monotonic() + 30)\n"
    )
    with coordinator() as address:
        child = python(code, address)
        _, errors = child.communicate(timeout=PATIENCE_S)
        assert (child.returncode, errors) == (0, b"")


def python(code, *arguments):
    """An interpreter that finds what this one finds."""
    paths = f"import sys; sys.path[:0] = {sys.path!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", paths + code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_state_says_how_the_stream_is_doing():
    with coordinator() as address, SamplerSession(address) as session:
        assert session.client.state == f"coordinator {address}: connected"


def test_coordinator_that_is_lost_is_not_said_to_want_tls():
    with ExitStack() as stack:
        with coordinator() as address:
            session = stack.enter_context(SamplerSession(address))
        while not session.client.state.endswith(
            "(its program has ended or can't be reached); it is dialled again"
        ):
            session.client._thread.join(0.01)
        assert "tls" not in session.client.state
