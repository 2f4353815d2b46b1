"""How a program joins a job, as its trainer or as a replica of samplers."""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Sharding

from tpu_sync_rl.addresses import join_address, split_address
from tpu_sync_rl.agent_sampler import AgentSamplerSession
from tpu_sync_rl.agent_trainer import AgentTrainerSession
from tpu_sync_rl.colocated import takes_agents
from tpu_sync_rl.hosted_coordinator import start_in_process_0
from tpu_sync_rl.manifest import Rename
from tpu_sync_rl.nics import find_nics
from tpu_sync_rl.options import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_WINDOW_NBYTES,
    AgentChoice,
    Commit,
    OnStraggler,
    Options,
    Staging,
    StagingMode,
    Verify,
    check_choice,
    checked_int,
    checked_name,
    checked_seconds,
)
from tpu_sync_rl.program import Program, share
from tpu_sync_rl.sampler import SamplerSession
from tpu_sync_rl.shard_table import is_abstract
from tpu_sync_rl.tls import TLS
from tpu_sync_rl.trainer import TrainerSession

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_LOOPBACK = "127.0.0.1:0"


def connect_trainer(
    *,
    coordinator: str | None = None,
    job: str = "policy",
    host_coordinator: bool = True,
    min_replicas: int = 0,
    timeout: float = DEFAULT_TIMEOUT_S,
    straggler_timeout: float = 60.0,
    on_straggler: OnStraggler = "wait",
    commit: Commit = "replica",
    token: str | bytes | None = None,
    nics: Sequence[str] | None = None,
    streams_per_rail: int | None = None,
    chunk_nbytes: int = 1 << 20,
    congestion: str | None = None,
    peer_timeout: float = 10.0,
    same_host: str = "auto",
    verify: Verify = "wire",
    staging: StagingMode = "auto",
    d2h_window_nbytes: int = DEFAULT_WINDOW_NBYTES,
    max_host_nbytes: int | None = None,
    insecure: bool = False,
    trace: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    metrics: "CollectorRegistry | None" = None,
    agent: AgentChoice = "auto",
) -> TrainerSession:
    """Joins `job` as its trainer: a new incarnation, which fences an older one.

    Collective: every process of the trainer program calls it. Process 0 starts the coordinator in
    a child process that lives no longer than itself.

    Example:
        >>> import jax.numpy as jnp, tpu_sync_rl as tsr
        >>> with tsr.connect_trainer() as session:
        ...     report = tsr.sync_weights({"w": jnp.zeros(4)}, to=session, version=7)
        >>> report.version, dict(report.replicas)
        (7, {})

    Args:
        coordinator: "host:port", or "[v6]:port", to host it at, or to dial with
            `host_coordinator=False`. None or port 0 takes a free port; `TrainerSession.coordinator`
            has it.
        job: name of the policy.
        host_coordinator: False where the coordinator runs alone
            (`python -m tpu_sync_rl.coordinator`).
        min_replicas: how many replicas have to be admitted before a version is announced.
        timeout: seconds that connecting may take, and default of the session's calls.
        straggler_timeout: seconds that a replica may take to receive a version, from when that is
            announced or its transfer begins, whichever is later. Then its pin ends: it gives up
            the version, keeps what it has, and gets newer ones.
        on_straggler: what becomes of a call for which a replica was too slow. "wait": it goes on
            waiting, to its deadline, for that replica to have a newer version. "drop": the replica
            counts as lost for this version at once, and stands in `Report.lost`.
        commit: "replica": each replica returns a version as soon as it has prepared it. "fleet":
            all live replicas return it, or none does. Their `sync_weights` take a version only
            when all that were live at its announcement have prepared it and returned the one
            before, and each process has stored that; what they have prepared they keep until then,
            whatever deadline passes. A version that waits for a replica which calls late holds up
            no publish: a newer one takes its place. With on_straggler="drop" it does not wait, and
            who calls late finds a newer one. A straggler (unless dropped) or a newer incarnation
            aborts the round: the call raises SyncTimeoutError, replicas keep the version before,
            and the next one starts a new round, when the one before is decided. A call whose
            deadline passes first raises SyncTimeoutError too, and its round goes on. Who dies is
            not waited for beyond `peer_timeout`; who joins late takes what was decided without it.
        token: secret of the job; None takes TSR_TOKEN or TSR_TOKEN_FILE. White space around it is
            no part of it. Without one only loopback is used, unless `insecure`.
        nics: names or addresses of the NICs to serve on; None finds them.
        streams_per_rail: accepted for symmetry with `connect_sampler`, whose value counts.
        chunk_nbytes: likewise.
        congestion: TCP congestion control of data connections; None is cubic over loopback, where
            that is allowed, and the system's elsewhere.
        peer_timeout: seconds without a sign of life after which a peer is lost.
        same_host: "auto" takes shared memory between processes of one host and user, "tcp" never.
        verify: "full" compares the copies that processes of the trainer hold of the same boxes
            before samplers hear of a version; one whose copies differ is refused. That costs each
            process one read of what it shares with others. Whatever this is, the first version of
            the session is compared. Other versions are not: their copies are taken for equal. How
            what comes is verified is up to `connect_sampler`.
        staging: how samplers read the params. "direct": from the arrays' own memory. "pinned_host":
            from a copy in pinned host memory, which is made leaf by leaf while others are on the
            wire, and kept until the next version for samplers that join late. "auto" takes it
            where a shard is on a device that is no CPU.
        d2h_window_nbytes: most bytes of these copies that are under way at a time.
        max_host_nbytes: most bytes of this process's copies; two fit if the trainer is not to wait
            for samplers that still read the version before. None is any number.
        insecure: listen beyond loopback without a token.
        trace: file for a Chrome trace of each sync: stages, and a track of chunks per stream.
            A program that is killed leaves it without its last "]": Chrome and Perfetto open it
            all the same, json.load does not.
            Each program needs its own; process n > 0 of it appends ".n".
        tls: encrypts the control streams with these certificates; the weights do not take them.
        metrics: prometheus_client.CollectorRegistry that gets the session's metrics.
        agent: where the data path runs. "process": in this process. "colocated": in agents on the
            hosts of the devices, by JAX's experimental colocated_python; `trace`, `nics` and the
            files of `tls` are then those of these hosts, there are no `metrics`, and JAX copies
            all leaves at once where the devices are no CPUs. "auto": in agents where the devices
            belong to other processes, as under Pathways.

    Raises:
        SyncError: the address is in use, in all processes of the program.
        SyncTimeoutError: no coordinator answered in time.
        AuthError: it has another token, or a certificate that `tls` does not trust.
        ValueError, TypeError: an option is not what it has to be.
    """
    options = Options.checked(
        job=job,
        token=token,
        timeout=timeout,
        nics=nics,
        streams_per_rail=streams_per_rail,
        chunk_nbytes=chunk_nbytes,
        congestion=congestion,
        peer_timeout=peer_timeout,
        same_host=same_host,
        verify=verify,
        insecure=insecure,
        trace=trace,
        tls=tls,
        metrics=metrics,
    )
    checked_staging = Staging.checked(
        staging, d2h_window_nbytes=d2h_window_nbytes, max_host_nbytes=max_host_nbytes
    )
    min_replicas = checked_int("min_replicas", min_replicas, 0)
    straggler_timeout_s = checked_seconds("straggler_timeout", straggler_timeout)
    check_choice("on_straggler", on_straggler, "wait", "drop")
    check_choice("commit", commit, "replica", "fleet")
    deadline = time.monotonic() + options.timeout_s
    if coordinator is None and not host_coordinator:
        raise ValueError("host_coordinator=False needs coordinator='host:port' to dial")
    address = _LOOPBACK if coordinator is None else coordinator
    host, port = split_address(address, dialled=not host_coordinator)
    by_agents = takes_agents(agent, jax.devices(), options, host)
    if not by_agents:
        _check_nics(options)
    process, address = None, join_address(host, port)
    if host_coordinator:
        process, address = start_in_process_0(host, port, options, deadline)
    try:
        settings: dict[str, Any] = {
            "incarnation": share(secrets.token_hex(8), deadline),
            "min_replicas": min_replicas,
            "straggler_timeout_s": straggler_timeout_s,
            "on_straggler": on_straggler,
            "commit": commit,
            "coordinator": address,
            "coordinator_process": process,
        }
        if by_agents:
            return AgentTrainerSession(options, checked_staging, **settings)
        return TrainerSession(
            options, Program.here(), checked_staging, deadline=deadline, **settings
        )
    except BaseException:
        if process is not None:
            process.stop()
        raise


def _check_nics(options: Options) -> None:
    """Tells what is wrong with `options.nics` here: later it is in the background, or not used."""
    if options.nics is not None:
        find_nics(options.nics)


def connect_sampler(
    *,
    coordinator: str,
    job: str = "policy",
    replica: str,
    like: Any,
    rename: Rename = None,
    cast: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    max_generations: int = 3,
    token: str | bytes | None = None,
    nics: Sequence[str] | None = None,
    streams_per_rail: int | None = None,
    chunk_nbytes: int = 1 << 20,
    congestion: str | None = None,
    peer_timeout: float = 10.0,
    same_host: str = "auto",
    verify: Verify = "wire",
    staging: StagingMode = "auto",
    h2d_window_nbytes: int = DEFAULT_WINDOW_NBYTES,
    max_host_nbytes: int | None = None,
    max_device_nbytes: int | None = None,
    insecure: bool = False,
    trace: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    metrics: "CollectorRegistry | None" = None,
    agent: AgentChoice = "auto",
) -> SamplerSession:
    """Joins `job` as one process of a replica, which then receives versions in the background.

    Collective: every process of the replica's program calls it. Dials until the coordinator
    answers, and does not wait for a trainer. A session with the same replica and process index
    fences the one before.

    Example:
        >>> import jax.numpy as jnp, tpu_sync_rl as tsr
        >>> trainer, params = tsr.connect_trainer(), {"w": jnp.arange(4)}
        >>> with trainer, tsr.connect_sampler(
        ...     coordinator=trainer.coordinator, replica="sampler-0", like=params
        ... ) as session:
        ...     report = tsr.sync_weights(params, to=trainer)
        ...     update = session.sync_weights()
        >>> update.version, update.params
        (1, {'w': Array([0, 1, 2, 3], dtype=int32)})

    Args:
        coordinator: "host:port", or "[v6]:port", of the coordinator.
        job: name of the policy.
        replica: name of this sampler program, different from that of the others in the job.
        like: pytree of ShapeDtypeStructs with shardings, or of arrays (read, not kept): what
            `Update.params` is to be like.
        rename: from the trainer's keys to those of `like`: a mapping (keys that it lacks stay) or
            a callable.
        cast: convert floats to the dtype of `like` at the source, to nearest even.
        timeout: seconds that connecting may take, and default of the session's calls.
        max_generations: most copies of the params in host memory: the current one, one that is
            being received, and more only while older arrays are held, or while a version that the
            fleet has committed waits to be taken.
        token: secret of the job; None takes TSR_TOKEN or TSR_TOKEN_FILE. White space around it is
            no part of it.
        nics: names or addresses of the NICs to receive on; None finds them.
        streams_per_rail: TCP connections per pair of NICs and source process; None is 2, and up
            to 16 where the way is too long for fewer.
        chunk_nbytes: most bytes that are asked for, checked and retried as one.
        congestion: TCP congestion control of data connections; None is cubic over loopback, where
            that is allowed, and the system's elsewhere.
        peer_timeout: seconds without a sign of life after which a peer is lost.
        same_host: "auto" takes shared memory between processes of one host and user, "tcp" never.
        verify: how what comes is held against what the trainer has. "wire": by a checksum of each
            chunk. "full": besides, before a version counts as prepared, the memory of its arrays
            is compared with the trainer's, box by box, by digests that tell where each element
            belongs; a version that differs is refused, and fetched anew. The trainer keeps its
            memory until then. "off": not at all.
        staging: how versions become arrays. "direct": they alias the memory that they came to.
            "pinned_host": each leaf is copied on to its devices as soon as it is verified. "auto"
            takes it where a shard is on a device that is no CPU.
        h2d_window_nbytes: most bytes of these copies that are under way at a time.
        max_host_nbytes: most bytes of this process's memory for versions, which lowers
            `max_generations`. None is any number.
        max_device_nbytes: most bytes of params on one device, where versions are copied there. If
            the next version does not fit beside the arrays that live, it is copied within the call
            that takes it, once the session has let go of the current one; SyncError where it still
            does not fit, since the application holds older arrays. None is any number.
        insecure: use NICs beyond loopback without a token.
        trace: file for a Chrome trace of each sync: stages, and a track of chunks per stream.
            A program that is killed leaves it without its last "]": Chrome and Perfetto open it
            all the same, json.load does not.
            Each program needs its own; process n > 0 of it appends ".n".
        tls: encrypts the control stream with these certificates; the weights do not take it.
        metrics: prometheus_client.CollectorRegistry that gets the session's metrics.
        agent: where the data path runs. "process": in this process. "colocated": in agents on the
            hosts of the devices, by JAX's experimental colocated_python; `trace`, `nics` and the
            files of `tls` are then those of these hosts, there are no `metrics`, and JAX copies
            all leaves at once where the devices are no CPUs. "auto": in agents where the devices
            belong to other processes, as under Pathways.

    Raises:
        SyncTimeoutError: no coordinator answered in time.
        AuthError: it has another token, or a certificate that `tls` does not trust.
        ValueError, TypeError: a leaf of `like` that can't be made, by its key; too little memory
            for a version; or a bad option.
    """
    options = Options.checked(
        job=job,
        token=token,
        timeout=timeout,
        nics=nics,
        streams_per_rail=streams_per_rail,
        chunk_nbytes=chunk_nbytes,
        congestion=congestion,
        peer_timeout=peer_timeout,
        same_host=same_host,
        verify=verify,
        insecure=insecure,
        trace=trace,
        tls=tls,
        metrics=metrics,
    )
    checked_staging = Staging.checked(
        staging,
        h2d_window_nbytes=h2d_window_nbytes,
        max_host_nbytes=max_host_nbytes,
        max_device_nbytes=max_device_nbytes,
    )
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(f"rename must be a mapping or a callable, not {rename!r}")
    replica = checked_name("replica", replica)
    max_generations = checked_int("max_generations", max_generations, 2)
    host, port = split_address(coordinator, dialled=True)
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(like)]
    devices = {
        device
        for sharding in shardings
        if isinstance(sharding, Sharding) and not is_abstract(sharding)
        for device in sharding.device_set
    }
    by_agents = takes_agents(agent, devices, options, host)
    if not by_agents:
        _check_nics(options)
    deadline = time.monotonic() + options.timeout_s
    settings: dict[str, Any] = {
        "coordinator": join_address(host, port),
        "replica": replica,
        "life": share(secrets.token_hex(8), deadline),
        "like": like,
        "rename": rename,
        "cast": cast,
        "max_generations": max_generations,
    }
    if by_agents:
        return AgentSamplerSession(options, checked_staging, deadline=deadline, **settings)
    return SamplerSession(options, Program.here(), checked_staging, deadline=deadline, **settings)
