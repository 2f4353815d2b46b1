"""The policy: a small decoder-only transformer, how it is sharded, and sampling from it."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpu_sync_rl.examples.sorting_task import LENGTH, NUM_DIGITS, START, VOCABULARY

WIDTH = 64
NUM_HEADS = 4
NUM_LAYERS = 1  # Enough to sort, and soon compiled.


class Block(nnx.Module):
    """Causal self-attention and an MLP, each added to the residual stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.float32, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(WIDTH, dtype=jnp.float32, rngs=rngs)
        self.queries = linear(WIDTH, WIDTH)
        self.keys = linear(WIDTH, WIDTH)
        self.values = linear(WIDTH, WIDTH)
        self.out = linear(WIDTH, WIDTH)
        self.mlp_norm = nnx.RMSNorm(WIDTH, dtype=jnp.float32, rngs=rngs)
        self.up = linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, length, WIDTH]` to the same shape."""
        y = self.attention_norm(x)
        heads = [
            layer(y).reshape(*y.shape[:-1], NUM_HEADS, WIDTH // NUM_HEADS)
            for layer in (self.queries, self.keys, self.values)
        ]
        x = x + self.out(jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Policy(nnx.Module):
    """Predicts the digits of an answer from the prompt and the answer's earlier digits.

    It computes in f32 whatever dtype its params have, so that trainer and samplers differ in the
    rounding of the params only.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.digits = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.float32, rngs=rngs)
        self.positions = nnx.Embed(2 * LENGTH, WIDTH, dtype=jnp.float32, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(NUM_LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.float32, rngs=rngs)
        self.head = nnx.Linear(WIDTH, NUM_DIGITS, use_bias=False, dtype=jnp.float32, rngs=rngs)

    def __call__(self, prompts: jax.Array, answers: jax.Array) -> jax.Array:
        """Logits `[batch, LENGTH, NUM_DIGITS]`; those of digit i depend on answers before i."""
        start = jnp.full_like(prompts[:, :1], START)
        sequence = jnp.concatenate([prompts, start, answers[:, :-1]], axis=1)
        x = self.digits(sequence) + self.positions(jnp.arange(2 * LENGTH))
        for block in self.blocks:
            x = block(x)
        logits: jax.Array = self.head(self.norm(x[:, LENGTH:]))
        return logits


def init_params(seed: int) -> Any:
    """New params, an `nnx.State`; traceable, so that jit can give them any sharding."""
    return nnx.state(Policy(nnx.Rngs(seed)), nnx.Param)


def abstract_policy() -> tuple[Any, Any]:
    """The graph definition of the policy, and its params as ShapeDtypeStructs; computes nothing."""
    return nnx.split(nnx.eval_shape(lambda: Policy(nnx.Rngs(0))), nnx.Param)


def make_mesh(axis: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with one axis over `devices`; None takes all of this program."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (axis,), axis_types=(AxisType.Auto,), devices=devices)


def fsdp_shardings(mesh: Mesh, tree: Any) -> Any:
    """Splits each leaf along its first dimension that the number of devices divides."""

    def sharding(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec: list[str | None] = []
        for extent in leaf.shape:
            if extent % mesh.size == 0:
                return NamedSharding(mesh, PartitionSpec(*spec, "fsdp"))
            spec.append(None)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree.map(sharding, tree)


def tensor_parallel_shardings(mesh: Mesh, tree: Any) -> Any:
    """Splits attention by heads and the MLP by hidden units; everything else is replicated."""

    def sharding(path: Any, _: jax.ShapeDtypeStruct) -> NamedSharding:
        names = set(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
        if names & {"queries", "keys", "values", "up"}:
            return NamedSharding(mesh, PartitionSpec(None, "tp"))
        if names & {"out", "down"}:
            return NamedSharding(mesh, PartitionSpec("tp", None))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree)


@functools.partial(jax.jit, static_argnames="graphdef")
def sample_answers(
    graphdef: Any, params: Any, prompts: jax.Array, seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Samples one answer per prompt, digit by digit.

    Args:
        graphdef: from `abstract_policy`.
        params: of any float dtype and sharding.
        prompts: `[batch, LENGTH]`, int32.
        seed: scalar, uint32.

    Returns:
        Answers, int32, and the log-probability of each of their digits, f32; `[batch, LENGTH]`.
    """
    policy = nnx.merge(graphdef, params)
    key = jax.random.key(seed)

    def write_digit(i: jax.Array, written: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        answers, logprobs = written
        scores = jax.nn.log_softmax(policy(prompts, answers)[:, i])
        digits = jax.random.categorical(jax.random.fold_in(key, i), scores)
        chosen = jnp.take_along_axis(scores, digits[:, None], axis=-1)[:, 0]
        return answers.at[:, i].set(digits.astype(answers.dtype)), logprobs.at[:, i].set(chosen)

    nothing = jnp.zeros_like(prompts), jnp.zeros(prompts.shape, jnp.float32)
    answers, logprobs = jax.lax.fori_loop(0, LENGTH, write_digit, nothing)
    return answers, logprobs
