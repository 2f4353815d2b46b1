"""Metrics of sessions, in a registry of the application."""

import sys

import jax.numpy as jnp
import prometheus_client
import pytest

import tpu_sync_rl as tsr
from tpu_sync_rl.metrics import Metrics
from tpu_sync_rl.report import RailReport, Report

PARAMS = {"w": jnp.arange(1000.0)}
TRAINER = {"job": "policy", "replica": "", "process_index": "0"}
SAMPLER = {"job": "policy", "replica": "s", "process_index": "0"}


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def report(version=1, replicas=None):
    rails = {"a-b": RailReport(nbytes=8, num_retries=2, num_lost=1)}
    return Report(version, "life", 1, 8, 8, {"wire": 0.5}, rails, replicas or {"s": version})


def test_metrics_follow_what_two_sessions_do(registry):
    def value(name, labels, **more):
        return registry.get_sample_value(f"tsr_{name}", labels | more)

    with (
        tsr.connect_trainer(metrics=registry, timeout=60) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like=PARAMS, metrics=registry, timeout=60
        ) as sampler,
    ):
        for version in (1, 2):
            trainer.sync_weights(PARAMS, version=version)
            assert sampler.sync_weights().version == version
        trainer.sync_weights(PARAMS, version=7)
        for labels, num_syncs, version in ((TRAINER, 3, 7), (SAMPLER, 2, 2)):
            assert value("syncs_total", labels) == num_syncs
            assert value("version", labels) == version
            assert value("newest_version", labels) == 7
            assert value("peers", labels) == 1
            assert value("seconds_total", labels, stage="total") > 0
        assert value("bytes_total", SAMPLER, rail="shm") == 8000
        assert value("bytes_total", TRAINER, rail="shm") == 12000
        assert (value("lag_versions", SAMPLER), value("lag_versions", TRAINER)) == (5, 0)
        with pytest.raises(tsr.SyncTimeoutError):
            sampler.sync_weights(min_version=8, timeout=0)
        assert value("failures_total", SAMPLER, error="SyncTimeoutError") == 1
    assert value("syncs_total", SAMPLER) == 2
    assert value("lag_versions", SAMPLER) is None, "what is no longer so is not shown"


def test_bytes_seconds_and_retries_add_up(registry):
    metrics = Metrics(registry, job="policy", replica="s", process_index=0)
    metrics.synced(report())
    metrics.retried()
    metrics.synced(report(2))
    for name, labels, total in (
        ("bytes", {"rail": "a-b"}, 16),
        ("chunk_retries", {"rail": "a-b"}, 4),
        ("lost_streams", {"rail": "a-b"}, 2),
        ("seconds", {"stage": "wire"}, 1.0),
        ("transfer_retries", {}, 1),
    ):
        assert registry.get_sample_value(f"tsr_{name}_total", SAMPLER | labels) == total


def test_lag_of_a_trainer_is_that_of_its_slowest_replica(registry):
    metrics = Metrics(registry, job="policy", replica=None, process_index=0)
    metrics.announced(9)
    metrics.synced(report(9, {"fast": 9, "slow": 6, "new": None}))
    assert registry.get_sample_value("tsr_lag_versions", TRAINER) == 3


def test_registry_can_be_shown(registry):
    Metrics(registry, job="policy", replica="s", process_index=0).synced(report())
    text = prometheus_client.generate_latest(registry).decode()
    assert text.count("# TYPE tsr_syncs_total counter") == 1


def test_without_a_registry_nothing_is_loaded():
    metrics = Metrics(None, job="policy", replica=None, process_index=0)
    metrics.synced(report())
    metrics.ended("SyncError")
    metrics.announced(1)
    metrics.met(1)
    metrics.close()


def test_other_things_than_a_registry_are_refused():
    with pytest.raises(TypeError, match=r"metrics must be a prometheus_client\.CollectorRegistry"):
        tsr.connect_trainer(metrics=True)


def test_missing_package_is_named(monkeypatch, registry):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"pip install 'tpu_sync_rl\[metrics\]'"):
        tsr.connect_trainer(metrics=registry)


def test_registry_that_raises_ends_the_metrics_and_no_sync(registry, monkeypatch, caplog):
    with (
        tsr.connect_trainer(metrics=registry, timeout=60) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like=PARAMS, metrics=registry, timeout=60
        ) as sampler,
    ):
        monkeypatch.setattr(prometheus_client.Counter, "labels", raises)
        monkeypatch.setattr(prometheus_client.Gauge, "labels", raises)
        for version in (1, 2):
            trainer.sync_weights(PARAMS, version=version)
            assert sampler.sync_weights().version == version
    told = [x.getMessage() for x in caplog.records if "its metrics= fail" in x.getMessage()]
    assert len(told) == 2 and all("RuntimeError: no metrics" in text for text in told)


def raises(*_):
    raise RuntimeError("no metrics")


def test_registry_with_other_metrics_of_our_names_is_refused(registry):
    prometheus_client.Counter("tsr_syncs", "Somebody else's.", registry=registry)
    with pytest.raises(ValueError, match="metrics=: the registry takes no metrics of ours"):
        tsr.connect_trainer(metrics=registry, timeout=60)
