"""Builds the extensions from csrc/; everything else is in pyproject.toml.

`tpu_sync_rl._native` is the core; `tpu_sync_rl.bench._limits` is what the benchmarks hold it
against, in a module of its own, so that the core has nothing of it.

To read headers takes longer than to compile what is ours, so they are read as seldom as can be:
those of pybind11 by one file, the standard ones once for all others.
"""

import glob
import os
import re
import threading
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

BINDINGS = sorted(glob.glob("csrc/py_*.cc"))
MODULE = "csrc/py_module.cc"  # includes the others of BINDINGS
CORE = sorted(set(glob.glob("csrc/*.cc")) - set(BINDINGS))
HEADERS = sorted(glob.glob("csrc/**/*.h", recursive=True))
EXTENSIONS = {
    "tpu_sync_rl._native": [MODULE, *CORE],
    "tpu_sync_rl.bench._limits": sorted(glob.glob("csrc/limits/*.cc")),
}


def _is_stale(obj: str, source: str) -> bool:
    """True where an object file is missing, or older than what it is made of."""
    if not os.path.exists(obj):
        return True
    parts = [*(BINDINGS if source == MODULE else [source]), *HEADERS]
    return any(os.path.getmtime(obj) < os.path.getmtime(path) for path in parts)


def _work(source: str) -> int:
    """About how long a file takes, beside others."""
    return sum(os.path.getsize(path) for path in (BINDINGS if source == MODULE else [source]))


class _BuildExt(build_ext):
    """Leaves the extension beside the sources too, also where a wheel is built.

    `python -m` in a checkout finds the sources there before what is installed.
    """

    def run(self) -> None:
        super().run()
        self.copy_extensions_to_source()

    def build_extensions(self) -> None:
        self._lock = threading.Lock()
        self._compile_all, self._compile = self.compiler.compile, self.compiler._compile
        self.compiler.compile, self.compiler._compile = self._compile_files, self._compile_file
        self.compiler.language_map = {**self.compiler.language_map, ".h": "c++"}
        super().build_extensions()

    def _compile_files(self, sources, **how) -> list[str]:
        """Compiles files on all cores, the longest first, so that none is idle at the end."""
        return self._compile_all(sorted(sources, key=_work, reverse=True), **how)

    def _compile_file(self, obj, source, ext, cc_args, flags, pp_opts) -> None:
        """Compiles one file, while other threads compile others."""
        if source == MODULE:
            # It only passes calls on, and more than this doubles the time of the longest file.
            flags = [*flags, "-O1"]
        elif Path(self.compiler.compiler_so_cxx[0]).name != "ccache":  # it would keep none of them
            with self._lock:
                std = self._precompiled(cc_args, flags, pp_opts)
            flags = [*flags, "-include", std]
        self._compile(obj, source, ext, cc_args, flags, pp_opts)

    def _precompiled(self, cc_args, flags, pp_opts) -> str:
        """A header with all standard headers that we include, which the compiler has read already.

        A compiler that finds that it was made by other flags reads the header itself.
        """
        includes = {
            line
            for path in [*CORE, *HEADERS]
            for line in re.findall(r"^#include <[a-z_]+>$", Path(path).read_text(), re.MULTILINE)
        }
        text = "\n".join(sorted(includes)) + "\n"
        header = Path(self.build_temp, "std.h")
        compiled = f"{header}.gch"
        if not header.exists() or header.read_text() != text or not os.path.exists(compiled):
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)
            self._compile(compiled, str(header), ".h", cc_args, flags, pp_opts)
        return str(header)


with ParallelCompile(default=len(os.sched_getaffinity(0)), needs_recompile=_is_stale):
    setup(
        ext_modules=[
            # No -march: what depends on the CPU is chosen at run time, so one wheel fits all.
            Pybind11Extension(
                name,
                sources,
                depends=[*HEADERS, *BINDINGS],
                cxx_std=20,
                extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread"],
                extra_link_args=["-pthread"],
            )
            for name, sources in EXTENSIONS.items()
        ],
        cmdclass={"build_ext": _BuildExt},
    )
