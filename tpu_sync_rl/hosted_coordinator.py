"""The coordinator that process 0 of a trainer hosts, as all of its processes learn of it."""

import jax

from tpu_sync_rl import errors
from tpu_sync_rl.coordinator_process import CoordinatorProcess, start_coordinator
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.options import Options
from tpu_sync_rl.program import share


def start_in_process_0(
    host: str, port: int, options: Options, deadline: float
) -> tuple[CoordinatorProcess | None, str]:
    """Starts the coordinator in process 0, which alone gets it; every process gets its address.

    Collective: every process of the program calls it.

    Raises:
        SyncError, ValueError: it could not be started, in all processes alike.
        SyncTimeoutError: a process did not come before the `deadline`.
    """
    process, told = None, {"address": "", "error": "", "text": ""}
    if jax.process_index() == 0:
        try:
            process = start_coordinator(
                host,
                port,
                token=options.token,
                peer_timeout=options.peer_timeout_s,
                insecure=options.insecure,
                tls=options.tls,
                job=options.job,
                deadline=deadline,
            )
            told["address"] = process.address
        except (SyncError, ValueError) as error:
            told["error"], told["text"] = type(error).__name__, str(error)[:2000]
    try:
        told = share(told, deadline)
    except SyncError:
        if process is not None:
            process.stop()
        raise
    if told["error"]:
        raise errors.by_name(told["error"])(told["text"])
    return process, told["address"]
