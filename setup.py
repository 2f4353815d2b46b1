"""Builds the extension `tpu_sync_rl._native` from csrc/; everything else is in pyproject.toml."""

import glob
import os

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

HEADERS = sorted(glob.glob("csrc/*.h"))


def _is_stale(obj: str, source: str) -> bool:
    """True where an object file is missing, or older than its source or than any header."""
    if not os.path.exists(obj):
        return True
    return any(os.path.getmtime(obj) < os.path.getmtime(path) for path in [source, *HEADERS])


class _BuildExt(build_ext):
    """Leaves the extension beside the sources too, also where a wheel is built.

    `python -m` in a checkout finds the sources there before what is installed.
    """

    def run(self) -> None:
        super().run()
        self.copy_extensions_to_source()


with ParallelCompile(default=len(os.sched_getaffinity(0)), needs_recompile=_is_stale):
    setup(
        ext_modules=[
            # No -march: what depends on the CPU is chosen at run time, so one wheel fits all.
            Pybind11Extension(
                "tpu_sync_rl._native",
                sorted(glob.glob("csrc/*.cc")),
                depends=HEADERS,
                cxx_std=20,
                extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread"],
                extra_link_args=["-pthread"],
            )
        ],
        cmdclass={"build_ext": _BuildExt},
    )
