"""What a trainer's call reports: its own part, and what its samplers measured."""

from dataclasses import replace

from tpu_sync_rl.process_stats import combined, on_lines_of
from tpu_sync_rl.program import Program
from tpu_sync_rl.report import DIRECT, PINNED_HOST, Report
from tpu_sync_rl.source import Source
from tpu_sync_rl.trainer_messages import Publish, PublishOutcome


def report_of(
    publish: Publish, decided: PublishOutcome, source: Source, program: Program
) -> Report:
    """The report on a call that succeeded; what `source` sent counts from the one before.

    Args:
        publish: what this process said of its part.
        decided: how the call ended.
        source: what it published.
        program: the trainer.
    """
    held = decided.outcome.held
    assert held is not None and source.manifest is not None
    received = combined([x for status in decided.replicas.values() for x in status.stats])
    sent = source.sent()
    total = {"total": decided.seconds["total"]}
    local = Report(
        version=held.version,
        incarnation=held.incarnation,
        epoch=decided.outcome.epoch,
        nbytes=source.nbytes,
        wire_nbytes=sum(rail.nbytes for rail in sent.rails.values()),
        seconds={**publish.seconds, **sent.seconds, **total},
        rails=on_lines_of(received.rails, sent.rails),
        replicas={name: status.version for name, status in decided.replicas.items()},
        lost=tuple(decided.lost),
        refused=decided.refused,
        staging=PINNED_HOST if source.is_staged else DIRECT,
        agent=program.agent,
    )
    return replace(
        local,
        nbytes=source.manifest.nbytes,
        wire_nbytes=received.wire_nbytes,
        seconds={**decided.seconds, **received.seconds, **total},
        rails=received.rails,
        local=local,
    )
