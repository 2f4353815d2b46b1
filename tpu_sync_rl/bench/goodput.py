"""What shaped rails carry without us: iperf3 on all of them at once, or raw sockets without it."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence

from tpu_sync_rl.bench.netns import Namespaces, Veth
from tpu_sync_rl.bench.raw_sockets import Connections, RawSockets

_PORT = 5201
_SECONDS = 1
_SETTLE_S = 1  # before them, not counted: until congestion control has found the rate
_RAW_S = 1.0  # what a sample of raw sockets takes about


class Goodput:
    """Samples the goodput from trainer to sampler, summed over rails that are loaded together.

    Args:
        namespaces: whose rails they are.
        rates_mbit: of each rail.
        congestion: TCP congestion control; None leaves the system's.
    """

    def __init__(
        self, namespaces: Namespaces, rates_mbit: Sequence[int], congestion: str | None
    ) -> None:
        self._namespaces = namespaces
        self._congestion = congestion
        self._exits = contextlib.ExitStack()
        self.name = "raw sockets"
        self._sample: Callable[[], float] = self._raw_sockets
        if shutil.which("iperf3") is not None:
            self.name = "iperf3"
            self._sample = self._iperf3
            return
        self._raw = [
            self._exits.enter_context(
                RawSockets(
                    int(rate_mbit * 1e6 / 8 * _RAW_S),
                    congestion,
                    hosts=[rail.trainer_host],
                    sender=namespaces.trainer,
                    receiver=namespaces.sampler,
                    ways=[Connections(2, fresh=False)],
                )
            )
            for rail, rate_mbit in zip(namespaces.rails, rates_mbit, strict=True)
        ]

    def gbytes_per_s(self) -> float:
        """One sample: a few seconds."""
        return self._sample()

    def __enter__(self) -> "Goodput":
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _raw_sockets(self) -> float:
        for raw in self._raw:
            raw.start_sample()
        return sum(raw.finish_sample() for raw in self._raw)

    def _iperf3(self) -> float:
        with contextlib.ExitStack() as exits:
            clients = []
            for rail in self._namespaces.rails:
                self._serve(rail, exits)
                clients.append(self._client(rail, exits))
            return sum(_goodput(client) for client in clients)

    def _serve(self, rail: Veth, exits: contextlib.ExitStack) -> None:
        command = ["iperf3", "-s", "-1", "--forceflush", "-B", rail.sampler_host, "-p", str(_PORT)]
        server = _start(self._namespaces.sampler, command, exits)
        assert server.stdout is not None
        if not any("listening" in line for line in server.stdout):
            raise RuntimeError(f"iperf3 does not listen on {rail.sampler_host}")

    def _client(self, rail: Veth, exits: contextlib.ExitStack) -> "subprocess.Popen[str]":
        command = ["iperf3", "-J", "-c", rail.sampler_host, "-B", rail.trainer_host]
        command += ["-p", str(_PORT), "-t", str(_SECONDS), "-O", str(_SETTLE_S)]
        if self._congestion is not None:
            command += ["-C", self._congestion]
        return _start(self._namespaces.trainer, command, exits)


def _start(
    namespace: str, command: list[str], exits: contextlib.ExitStack
) -> "subprocess.Popen[str]":
    """Runs a command in a namespace, to the end of `exits` at most."""
    process = exits.enter_context(
        subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    )
    exits.callback(process.kill)
    return process


def _goodput(client: "subprocess.Popen[str]") -> float:
    output, _ = client.communicate()
    result = json.loads(output)
    if "error" in result:
        raise RuntimeError(f"iperf3: {result['error']}")
    return float(result["end"]["sum_received"]["bits_per_second"]) / 8e9
