"""The examples in the docstrings of public functions do what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["connect", "one_client", "sync", "sync_handle"])
def test_examples_hold(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"tpu_sync_rl.{module}"))
    assert results.attempted > 0
    assert results.failed == 0
