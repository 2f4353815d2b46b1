"""Sessions whose data path runs in agents are, to their users, what the others are."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

import pytest

from tpu_sync_rl.agent_sampler import AgentSamplerSession
from tpu_sync_rl.agent_trainer import AgentTrainerSession
from tpu_sync_rl.sampler import SamplerSession
from tpu_sync_rl.trainer import TrainerSession

PAIRS = [(AgentTrainerSession, TrainerSession), (AgentSamplerSession, SamplerSession)]


def _of_self(function: FunctionType, context: type[ast.expr_context]) -> set[str]:
    """Attributes of `self` that a method reads (ast.Load) or sets (ast.Store)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
    }


def _public(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        is_hidden = name.startswith("_") and not name.endswith("__")
        if isinstance(function, FunctionType) and not is_hidden:
            yield name, function


@pytest.mark.parametrize(("child", "parent"), PAIRS)
def test_what_is_inherited_needs_nothing_that_only_the_parent_has(
    child: type, parent: type
) -> None:
    """A session of agents is not initialised as its parent: each agent has that state."""
    for name, function in _public(parent):
        if name not in vars(child):
            state = {x for x in _of_self(function, ast.Load) if x.startswith("_")}
            assert not state, f"{child.__name__} has to have a {name} of its own"


@pytest.mark.parametrize(("child", "parent"), PAIRS)
def test_public_attributes_are_those_of_the_parent(child: type, parent: type) -> None:
    made, expected = (
        {x for x in _of_self(kind.__init__, ast.Store) if not x.startswith("_")}
        for kind in (child, parent)
    )
    assert made == expected
