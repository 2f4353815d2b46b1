"""Eight CPU devices, set before JAX is imported anywhere, and the seeds of what tests draw."""

import os

import pytest
from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"
_DEVICES = "--xla_force_host_platform_device_count="
_FLAGS = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, f"{_DEVICES}8"])


def pytest_addoption(parser):
    parser.addoption("--versions", type=int, default=200, help="how many test_soak.py publishes")
    parser.addoption("--seed", type=int, default=0, help="draw anew; 0 draws as ever")


@pytest.hookimpl(tryfirst=True)  # before the plugin of hypothesis reads its options
def pytest_configure(config):
    seed = config.getoption("--seed")
    settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
    settings.register_profile("drawn", deadline=None, print_blob=True, database=None)
    settings.load_profile("drawn" if seed else "fixed")
    config.option.hypothesis_seed = seed or None


@pytest.fixture
def seed(pytestconfig) -> int:
    """What a test that draws at random adds to its own seeds."""
    return pytestconfig.getoption("--seed")
