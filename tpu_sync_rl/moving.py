"""How the library moves bytes under what an application sets around its own code."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """Lets this thread move weights between host and devices, whatever JAX is told.

    `jax_transfer_guard` finds transfers that nobody meant; those of the library are meant, the
    implicit and the explicit ones. `jax_debug_nans` and `jax_debug_infs` look for the computation
    that made a value, and JAX copies between kinds of memory by one; weights may hold any value.
    Such copies also fail on devices that are not of the mesh that `jax.set_mesh` set, and under
    `jax.disable_jit`. The application's own threads, and what it does between the library's calls,
    keep all of that. Entering and leaving takes 30 µs: use it around many leaves.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.disable_jit(False))
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(None))
        yield
