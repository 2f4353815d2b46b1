"""What sessions do, as metrics of an application's Prometheus registry."""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec
from weakref import WeakKeyDictionary

from tpu_sync_rl.report import Report

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge

P = ParamSpec("P")
_LABELS = ("job", "replica", "process_index")


class _Families:
    """The metrics of one registry. All sessions share them, each with labels of its own."""

    def __init__(self, registry: "CollectorRegistry") -> None:
        from prometheus_client import Counter, Gauge

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tsr_{name}", text, (*_LABELS, *labels), registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tsr_{name}", text, _LABELS, registry=registry)

        self.syncs = counter("syncs", "Versions published, or taken.")
        self.failures = counter("failures", "Calls that raised, by class of the error.", "error")
        self.nbytes = counter("bytes", "Bytes that a process sent, or received.", "rail")
        self.chunk_retries = counter("chunk_retries", "Chunks asked for again.", "rail")
        self.lost = counter("lost_streams", "Data connections that broke.", "rail")
        self.retries = counter("transfer_retries", "Transfers that failed, and are tried again.")
        self.seconds = counter("seconds", "Time per stage of a sync.", "stage")
        self.version = gauge("version", "The version that was published, or taken, last.")
        self.newest = gauge("newest_version", "The newest version that was announced.")
        self.lag = gauge("lag_versions", "The newest version less that of the slowest replica.")
        self.peers = gauge("peers", "Replicas of a trainer; trainer processes of a sampler.")

    @property
    def gauges(self) -> "list[Gauge]":
        return [self.version, self.newest, self.lag, self.peers]


_families: "WeakKeyDictionary[CollectorRegistry, _Families]" = WeakKeyDictionary()


def _counting(
    method: "Callable[Concatenate[Metrics, _Families, P], None]",
) -> "Callable[Concatenate[Metrics, P], None]":
    """Calls `method` while there are families; one that fails ends them, and no sync."""

    @functools.wraps(method)
    def counting(self: "Metrics", /, *args: P.args, **kwargs: P.kwargs) -> None:
        families = self._families
        if families is None:
            return
        try:
            method(self, families, *args, **kwargs)
        except Exception as error:
            self._families = None
            self._warn(
                f"its metrics= fail, and are kept no longer: {type(error).__name__}: {error}"
            )

    return counting


class Metrics:
    """Metrics of one process of a job; nothing at all without a registry, or once that fails.

    Its methods may be called from any thread, never block and never raise.
    """

    def __init__(
        self,
        registry: "CollectorRegistry | None",
        *,
        job: str,
        replica: str | None,
        process_index: int,
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Registers the metrics, unless another session has already.

        Args:
            registry: one that `check_registry` let pass.
            job: label.
            replica: label, empty on a trainer.
            process_index: label.
            warn: is told, once, that they fail.

        Raises:
            ValueError: the registry takes none of them, since it has others of their names.
        """
        self._warn = warn
        self._labels = (job, replica or "", str(process_index))
        self._newest: int | None = None
        self._slowest: int | None = None
        self._families = None if registry is None else _families_of(registry)

    @_counting
    def synced(self, families: _Families, report: Report) -> None:
        """A call has published, or taken, a version."""
        local = report.local or report
        families.syncs.labels(*self._labels).inc()
        families.version.labels(*self._labels).set(report.version)
        for rail, traffic in local.rails.items():
            families.nbytes.labels(*self._labels, rail).inc(traffic.nbytes)
            families.chunk_retries.labels(*self._labels, rail).inc(traffic.num_retries)
            families.lost.labels(*self._labels, rail).inc(traffic.num_lost)
        for stage, spent_s in local.seconds.items():
            families.seconds.labels(*self._labels, stage).inc(spent_s)
        versions = [version for version in report.replicas.values() if version is not None]
        self._slowest = min(versions, default=report.version)
        self._show_lag(families)

    @_counting
    def ended(self, families: _Families, error: str) -> None:
        """A call has ended with an error of this class, "" for none."""
        if error not in ("", "Nothing"):
            families.failures.labels(*self._labels, error).inc()

    @_counting
    def retried(self, families: _Families) -> None:
        """A version did not come, and is tried again."""
        families.retries.labels(*self._labels).inc()

    @_counting
    def announced(self, families: _Families, version: int) -> None:
        """The newest version is `version`."""
        families.newest.labels(*self._labels).set(version)
        self._newest = version
        self._show_lag(families)

    @_counting
    def met(self, families: _Families, num_peers: int) -> None:
        """There are `num_peers` replicas, or trainer processes."""
        families.peers.labels(*self._labels).set(num_peers)

    @_counting
    def close(self, families: _Families) -> None:
        """Takes back what is no longer so; counters stay. Idempotent."""
        self._families = None
        for gauge in families.gauges:
            with contextlib.suppress(KeyError):  # it was never set
                gauge.remove(*self._labels)

    def _show_lag(self, families: _Families) -> None:
        if self._newest is not None and self._slowest is not None:
            families.lag.labels(*self._labels).set(max(0, self._newest - self._slowest))


def check_registry(registry: object) -> None:
    """Sees to it that `Metrics` can use `registry`, if it is not None.

    Raises:
        ValueError: prometheus-client is not installed.
        TypeError: `registry` is no registry of it.
    """
    if registry is None:
        return
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise ValueError(
            "metrics= needs prometheus-client: pip install 'tpu_sync_rl[metrics]'"
        ) from error
    if not isinstance(registry, CollectorRegistry):
        raise TypeError(f"metrics must be a prometheus_client.CollectorRegistry, not {registry!r}")


def _families_of(registry: "CollectorRegistry") -> _Families:
    if registry not in _families:
        try:
            _families[registry] = _Families(registry)
        except ValueError as error:
            raise ValueError(f"metrics=: the registry takes no metrics of ours: {error}") from error
    return _families[registry]
