"""What sessions do, as metrics of an application's Prometheus registry."""

import contextlib
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tpu_sync_rl.report import Report

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge

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


class Metrics:
    """Metrics of one process of a job; nothing at all without a registry.

    Its methods may be called from any thread and never block.
    """

    def __init__(
        self,
        registry: "CollectorRegistry | None",
        *,
        job: str,
        replica: str | None,
        process_index: int,
    ) -> None:
        """Registers the metrics, unless another session has already.

        Args:
            registry: one that `check_registry` let pass.
            job: label.
            replica: label, empty on a trainer.
            process_index: label.
        """
        self._labels = (job, replica or "", str(process_index))
        self._newest: int | None = None
        self._slowest: int | None = None
        self._families = None if registry is None else _families_of(registry)

    def synced(self, report: Report) -> None:
        """A call has published, or taken, a version."""
        families = self._families
        if families is None:
            return
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
        self._show_lag()

    def ended(self, error: str) -> None:
        """A call has ended with an error of this class, "" for none."""
        if self._families is not None and error not in ("", "Nothing"):
            self._families.failures.labels(*self._labels, error).inc()

    def retried(self) -> None:
        """A version did not come, and is tried again."""
        if self._families is not None:
            self._families.retries.labels(*self._labels).inc()

    def announced(self, version: int) -> None:
        """The newest version is `version`."""
        if self._families is not None:
            self._families.newest.labels(*self._labels).set(version)
            self._newest = version
            self._show_lag()

    def met(self, num_peers: int) -> None:
        """There are `num_peers` replicas, or trainer processes."""
        if self._families is not None:
            self._families.peers.labels(*self._labels).set(num_peers)

    def close(self) -> None:
        """Takes back what is no longer so; counters stay. Idempotent."""
        if self._families is not None:
            for gauge in self._families.gauges:
                with contextlib.suppress(KeyError):  # it was never set
                    gauge.remove(*self._labels)
        self._families = None

    def _show_lag(self) -> None:
        assert self._families is not None
        if self._newest is not None and self._slowest is not None:
            lag = max(0, self._newest - self._slowest)
            self._families.lag.labels(*self._labels).set(lag)


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
        _families[registry] = _Families(registry)
    return _families[registry]
