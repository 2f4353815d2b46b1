"""What happened to one process of a job, for its log and its metrics."""

from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.message_codec import FromCoordinator
from tpu_sync_rl.messages import Message, TrainerUp
from tpu_sync_rl.metrics import Metrics
from tpu_sync_rl.options import Options
from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.report import Report, shown_nbytes
from tpu_sync_rl.sampler_messages import (
    Abandon,
    FetchFailed,
    FleetCommit,
    JobEnded,
    Latest,
    Prepared,
    Refuse,
    SamplerOutcome,
    Withdrawn,
)
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.trainer_messages import Announced, JobClosed, Pins, PublishOutcome

_LEAST_TOKEN_NBYTES = 16  # as many random bits as HMAC-SHA256 needs to be out of reach


class Journal:
    """Reads along what a process and the coordinator say to each other.

    Nothing that happens to a session passes it by, so no other room of one logs. `sent` may be
    called from any thread, what begins with `on_` from the one that reads the stream.
    """

    def __init__(self, options: Options, role: str, name: str, process_index: int) -> None:
        """Of process `process_index` of a trainer (`name` is its incarnation), or of a replica."""
        replica = None if role == "trainer" else name
        self._is_first = process_index == 0
        self._log = SessionLog(options.job, replica, process_index)
        self._metrics = Metrics(
            options.metrics,
            job=options.job,
            replica=replica,
            process_index=process_index,
            warn=self._log.warning,
        )
        self._trainer = ""  # the incarnation that is known
        self._failure: FetchFailed | None = None  # the last one
        self._refused: dict[str, str] = {}
        self._has_joined = False
        self._has_counted = False
        if self._is_first and 0 < len(options.token) < _LEAST_TOKEN_NBYTES:
            self._log.warning(
                f"its token is shorter than {_LEAST_TOKEN_NBYTES} bytes, and may be guessed: "
                "take a longer one, such as of openssl rand -hex 32"
            )

    def counted(self, num_leaves: int) -> None:
        """This program has so many leaves."""
        if num_leaves == 0 and self._is_first and not self._has_counted:
            self._log.warning(
                "has no leaves, so that nothing is moved: the tree is empty, or a filter kept "
                "nothing of it"
            )
        self._has_counted = True

    def on_joined(self, address: str) -> None:
        """The coordinator has taken this process in, for the first time or again."""
        again = " again" if self._has_joined else ""
        self._has_joined = True
        self._log.info(f"joined{again}, at the coordinator {address}")

    def on_stream_lost(self, failure: str) -> None:
        """The stream to the coordinator has broken."""
        self._log.warning(f"lost the coordinator, and dials it again: {failure}")

    def on_refused(self, error: SyncError) -> None:
        """The coordinator has thrown this process out."""
        self._log.warning(f"ended by the coordinator: {error}")

    def synced(self, report: Report) -> None:
        """A call has returned `report`."""
        self._metrics.synced(report)

    def close(self) -> None:
        """The session is over."""
        self._metrics.close()

    def sent(self, message: Message) -> None:
        """This process tells the coordinator something."""
        match message:
            case Refuse():
                self._log.warning(f"does not fit the trainer, and is refused:\n{message.text}")
            case FetchFailed():
                self._on_failed(message)
            case Prepared():
                self._on_prepared(message.held.version, message.stats)
            case _:
                pass

    def on_message(self, message: FromCoordinator) -> None:
        """The coordinator tells this process something."""
        match message:
            case TrainerUp() if message.incarnation != self._trainer:
                self._trainer = message.incarnation
                self._metrics.met(len(message.sources))
                self._log.info(
                    f"the trainer is incarnation {message.incarnation}, "
                    f"processes: {len(message.sources)}"
                )
            case Announced():
                self._metrics.announced(message.version)
                self._log.debug("announced", message.version)
            case Latest():
                self._metrics.announced(message.held.version)
            case Abandon() if self._failure is None or message.held != self._failure.held:
                self._log.warning(
                    "is not received any further: it took longer than the trainer's "
                    "straggler_timeout, another process of the replica failed, or the fleet "
                    "has given it up",
                    message.held.version,
                )
            case Withdrawn():
                self._log.warning(
                    f"withdrawn, no replica of the fleet takes it: {message.text}",
                    message.held.version,
                )
            case FleetCommit():
                self._log.debug("committed by the fleet", message.held.version)
            case Pins(sinks=[]):
                self._log.debug("let go: nobody is to read it any more", message.version)
            case PublishOutcome():
                self._on_published(message)
            case SamplerOutcome():
                if message.outcome.held is not None:
                    self._log.debug("taken", message.outcome.held.version)
                self._metrics.ended(message.outcome.error)
            case JobEnded():
                self._log.info(f"the job has ended: {message.text}")
            case JobClosed():
                self._log.info("the job is closed")
            case _:
                pass

    def _on_failed(self, message: FetchFailed) -> None:
        self._metrics.retried()
        text = f"not received, but tried again: {message.error}: {message.text}"
        if message == self._failure:
            self._log.debug(text, message.held.version)
        else:
            self._log.warning(text, message.held.version)
        self._failure = message

    def _on_prepared(self, version: int, stats: ProcessStats) -> None:
        for name, rail in stats.rails.items():
            if rail.num_lost:
                self._log.warning(f"rail {name} lost {rail.num_lost} streams", version)
            if rail.num_retries:
                self._log.info(f"{rail.num_retries} chunks asked for again, on {name}", version)
        total_s = stats.seconds.get("total", 0.0)
        self._log.debug(f"prepared: {shown_nbytes(stats.wire_nbytes)} in {total_s:.3f} s", version)

    def _on_published(self, message: PublishOutcome) -> None:
        self._metrics.met(len(message.replicas))
        self._metrics.ended(message.outcome.error)
        held = message.outcome.held
        version = None if held is None else held.version
        if not self._is_first:
            return  # what follows is equal in all processes
        for name in message.lost:
            self._log.warning(f"replica {name!r} is lost", version)
        for name, why in message.refused.items():
            if self._refused.get(name) != why:
                self._log.warning(f"replica {name!r} does not fit, and is refused:\n{why}", version)
        self._refused = message.refused
