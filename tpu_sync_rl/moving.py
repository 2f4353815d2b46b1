"""How the library moves bytes under the guards that an application sets around its own code."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """Lets this thread move weights between host and devices, whatever JAX is told to guard.

    `jax_transfer_guard` finds transfers that nobody meant; those of the library are meant, the
    implicit and the explicit ones. `jax_debug_nans` and `jax_debug_infs` look for the computation
    that made a value, and JAX copies between kinds of memory by one; weights may hold any value.
    The application's own threads, and what it does between the library's calls, stay guarded.
    Entering and leaving takes 20 µs: use it around many leaves.
    """
    with jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False):
        yield
