"""The floors of the package: a module imports only from floors below its own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tpu_sync_rl"
CSRC = ROOT / "csrc"

# From the ground up. The modules of one line do not know one another.
FLOORS = (
    # words
    ("addresses", "job_token", "tls", "report"),
    ("metrics",),
    ("errors", "deadline"),
    (
        "descriptors",
        "maker_process",
        "own_module",
        "at_exit",
        "threads",
        "options",
        "authentication",
        "trace",
        "moving",
    ),
    ("session_log", "software"),
    # pure: leaves, boxes, plans
    ("tree", "process_stats", "program", "update"),
    ("manifest",),
    ("shard_table",),
    ("plan", "local_shards", "shared_boxes"),
    # effects: device memory, host memory, sockets
    ("nics", "handshake", "same_host", "tcp"),
    ("nic_pairs",),
    ("buffers", "rails", "transport"),
    ("generation_layout", "listener"),
    ("generations",),
    ("staging", "verification"),
    ("snapshot", "device_memory", "copy_digests"),
    ("staged_generations",),
    # control
    ("messages", "long_messages", "message_room", "keepalive"),
    ("trainer_messages", "sampler_messages", "greeting"),
    ("message_codec",),
    ("call_log", "epochs", "members", "restored", "transfer", "verdict"),
    ("replica", "copy_comparison"),
    ("fleet", "inheritance", "readers"),
    ("holders",),
    ("sources",),
    ("publish_call",),
    ("publish_log",),
    ("incarnation",),
    ("job",),
    ("coordinator_process",),
    ("coordinator_server", "journal", "channel", "hosted_coordinator"),
    ("coordinator", "client"),
    # roles
    ("calls", "dialler", "planner", "prepared_versions"),
    ("rail_watch",),
    ("publications", "sync_handle", "feed", "take_calls", "updates"),
    ("pins", "receiver"),
    ("source",),
    ("offers", "publish_report"),
    ("trainer", "sampler", "one_client"),
    # roles by agents
    ("agent_arrays",),
    ("colocated",),
    ("agent",),
    ("agent_calls",),
    ("agent_trainer", "agent_sampler"),
    ("connect",),
    ("agent_client",),
    ("sync",),
    # top
    ("__init__",),
    ("flags",),
    ("examples",),
    ("child_programs", "progress"),
    ("local_job",),
    ("launch", "bench", "doctor"),
)
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
USES_NATIVE = {
    "plan",
    "buffers",
    "snapshot",
    "generations",
    "staged_generations",
    "transport",
    "verification",
    "copy_digests",
    "one_client",
    "bench",
    "doctor",
}
MAX_LINES = 400
NO_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "base", "manager", "handler"}

# examples/ is a link, which "**" does not follow.
SOURCES = sorted(
    path.relative_to(PACKAGE)
    for pattern in ("*.py", "bench/*.py", "doctor/*.py", "examples/*.py")
    for path in PACKAGE.glob(pattern)
)


def module_of(path: Path) -> str:
    """The module or package right below `tpu_sync_rl` that a file belongs to."""
    return path.parts[0].removesuffix(".py")


def imported(source: str) -> Iterator[str]:
    """The modules right below `tpu_sync_rl` that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the floor they come from"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            if parts[0] == "tpu_sync_rl":
                below = parts[1] if len(parts) > 1 else "__init__"
                yield below if below in FLOOR_OF or below == "_native" else "__init__"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_module_imports_only_from_floors_below(path):
    module = module_of(path)
    assert module in FLOOR_OF, f"{path}: give the module a floor in FLOORS"
    for other in imported((PACKAGE / path).read_text()):
        if other == "_native":
            assert module in USES_NATIVE, f"{path} must not import _native"
        elif other != module:
            assert FLOOR_OF[other] < FLOOR_OF[module], f"{path} imports {other}, a floor too high"


def test_every_module_on_the_floors_is_there():
    assert set(FLOOR_OF) == {module_of(path) for path in SOURCES}


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import tpu_sync_rl as tsr", ["__init__"]),
        ("from tpu_sync_rl import errors, sync_weights", ["errors", "__init__"]),
        ("from tpu_sync_rl.plan import Plan", ["plan"]),
        ("from tpu_sync_rl import _native", ["_native"]),
        ("def late():\n    from tpu_sync_rl.bench.models import MODELS", ["bench"]),
        ("import jax", []),
    ],
)
def test_imports_are_found_in_every_spelling(source, modules):
    assert list(imported(source)) == modules


def test_only_bindings_know_python():
    for path in sorted(CSRC.glob("*.*")):
        includes = re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text(errors="ignore"))
        if not path.name.startswith("py_"):
            knows = [name for name in includes if name.startswith(("pybind11", "py_", "Python"))]
            assert not knows, f"{path.name} includes {knows}"


def test_module_is_made_of_all_bindings():
    bindings = {path.name for path in CSRC.glob("py_*.cc")} - {"py_module.cc"}
    assert set(re.findall(r'#include "(.*\.cc)"', (CSRC / "py_module.cc").read_text())) == bindings


@pytest.mark.parametrize(
    "path",
    [
        *(PACKAGE / path for path in SOURCES),
        *sorted(CSRC.rglob("*.cc")),
        *sorted(CSRC.rglob("*.h")),
    ],
    ids=lambda path: path.name,
)
def test_file_is_short_and_named_after_what_it_owns(path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{path} has {num_lines} lines"
    assert not NO_NAMES & set(path.stem.split("_")), f"{path} is named after nothing"


def test_deadlines_do_not_follow_the_wall_clock():
    clocks = re.compile(r"\btime\.time\(|time_ns\(|datetime|system_clock|CLOCK_REALTIME")
    sources = [*(PACKAGE / path for path in SOURCES), *CSRC.glob("*.cc"), *CSRC.glob("*.h")]
    readers = {path.name for path in sources if clocks.search(path.read_text())}
    # They say when a stage was, and which incarnation came first; they wait for nothing.
    assert readers == {"trace.py", "epochs.py"}
