"""What a sampler process has open to one program that it reads from."""

from tpu_sync_rl.dialler import Dialler
from tpu_sync_rl.messages import Holder, TrainerUp
from tpu_sync_rl.options import Options
from tpu_sync_rl.plan import Plan
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.transport import Fetcher
from tpu_sync_rl.verification import Verification


class Feed:
    """The streams to a trainer incarnation, or to a replica in its place, and what comes by them.

    Attributes:
        name: of the program that is read from, for people.
        reads_from: the incarnation whose versions come, the replica that serves them if it is one,
            and the sink as which their processes know this one.
        plan: what is read from which of them.
        fetcher, dialler: read, and open streams.
        verification: with verify="full".
    """

    def __init__(
        self,
        options: Options,
        plan: Plan,
        trainer: TrainerUp,
        holder: Holder | None,
        sink: int,
        *,
        traced: bool,
        log: SessionLog,
    ) -> None:
        """Opens no stream yet."""
        self.name = "the trainer" if holder is None else f"replica {holder.replica!r}"
        self.reads_from = (trainer, holder, sink)
        self.plan = plan
        self.fetcher = Fetcher(
            plan.native,
            peer_timeout_s=options.peer_timeout_s,
            traced=traced,
            verify=options.verify,
        )
        where = holder or trainer
        self.dialler = Dialler(
            options,
            self.fetcher,
            {process: where.sources[process] for process in plan.source_processes},
            name="trainer" if holder is None else f"replica {holder.replica!r},",
            incarnation=trainer.incarnation,
            sink=sink,
            tickets=where.tickets,
            log=log,
        )
        self.verification = Verification(plan) if options.verify == "full" else None

    def close(self) -> None:
        """Closes the streams."""
        self.dialler.close()
        self.fetcher.close()
