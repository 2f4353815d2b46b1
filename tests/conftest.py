"""Eight CPU devices for every test, set before JAX is imported anywhere."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_DEVICES = "--xla_force_host_platform_device_count="
_FLAGS = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, f"{_DEVICES}8"])


def pytest_addoption(parser):
    parser.addoption("--versions", type=int, default=200, help="how many test_soak.py publishes")
