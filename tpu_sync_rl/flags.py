"""The options of `connect_trainer` and `connect_sampler` as absl flags: `--tsr_coordinator` etc.

Importing this module defines them, so import it only where a program takes its options from absl.
The token is not among them, since other users of a machine can see command lines: pass it in
TSR_TOKEN or TSR_TOKEN_FILE. `like`, `rename` and `metrics` are no strings.

Example:
    from tpu_sync_rl import flags as tsr_flags

    def main(argv):
        session = tsr.connect_trainer(**tsr_flags.connect_options(tsr.connect_trainer))
"""

import inspect
from collections.abc import Callable
from typing import Any

from absl import flags

from tpu_sync_rl.addresses import join_address, split_address
from tpu_sync_rl.tls import TLS

_PREFIX = "tsr_"
_TLS = ("certificate", "key", "ca", "server_name")  # of tls=, as --tsr_tls_certificate and so on


class AddressParser(flags.ArgumentParser[str]):
    """Takes what `split_address` takes, so that a command line with another address is refused."""

    def parse(self, argument: str) -> str:
        """The address as it is shown; raises ValueError where `argument` is none."""
        return join_address(*split_address(argument, "it"))

    def flag_type(self) -> str:
        """What the help calls it."""
        return "host:port"


flags.DEFINE(
    AddressParser(),
    "tsr_coordinator",
    None,
    "host:port of the coordinator. A trainer hosts it there, at a free port if that is 0.",
    serializer=flags.ArgumentSerializer[str](),
)
flags.DEFINE_string("tsr_job", None, "Name of the policy; a coordinator serves several.")
flags.DEFINE_string("tsr_replica", None, "Sampler: name of the replica, unique within the job.")
flags.DEFINE_bool(
    "tsr_host_coordinator",
    None,
    "Trainer: start the coordinator; false where it runs alone, "
    "by python -m tpu_sync_rl.coordinator.",
)
flags.DEFINE_integer(
    "tsr_min_replicas", None, "Trainer: replicas that have to be there for a version.", 0
)
flags.DEFINE_float("tsr_timeout", None, "Seconds that connecting and each call may take.", 0)
flags.DEFINE_float(
    "tsr_straggler_timeout",
    None,
    "Trainer: seconds that a replica may take to receive a version before its pin ends.",
    0,
)
flags.DEFINE_enum(
    "tsr_on_straggler",
    None,
    ["wait", "drop"],
    "Trainer: drop: a call goes on without a replica that took too long.",
)
flags.DEFINE_enum(
    "tsr_commit",
    None,
    ["replica", "fleet"],
    "Trainer: fleet: all live replicas return a version, or none does.",
)
flags.DEFINE_bool(
    "tsr_cast", None, "Sampler: convert floats to the sampler's dtype, to nearest even."
)
flags.DEFINE_integer(
    "tsr_max_generations", None, "Sampler: most copies of the params in host memory.", 2
)
flags.DEFINE_list("tsr_nics", None, "Names or addresses of the NICs to use; default: all.")
flags.DEFINE_integer(
    "tsr_streams_per_rail", None, "Sampler: TCP connections per pair of NICs and source process.", 1
)
flags.DEFINE_integer("tsr_chunk_nbytes", None, "Sampler: most bytes of a chunk.", 4096)
flags.DEFINE_string(
    "tsr_congestion", None, "TCP congestion control of data connections, such as cubic."
)
flags.DEFINE_float(
    "tsr_peer_timeout", None, "Seconds without a sign of life after which a peer is lost.", 1
)
flags.DEFINE_enum(
    "tsr_same_host",
    None,
    ["auto", "tcp"],
    "tcp: use no shortcut between processes of one host.",
)
flags.DEFINE_enum(
    "tsr_verify",
    None,
    ["off", "wire", "full"],
    "Sampler: wire: a checksum of each chunk; full: compare the memory of both ends, too. Trainer: "
    "full: compare the copies of every version on several processes, not of the first one alone.",
)
flags.DEFINE_enum(
    "tsr_staging",
    None,
    ["auto", "direct", "pinned_host"],
    "pinned_host: copy versions between devices and host memory; auto: where devices are no CPUs.",
)
flags.DEFINE_integer(
    "tsr_d2h_window_nbytes", None, "Trainer: most bytes of copies to the host under way at once.", 1
)
flags.DEFINE_integer(
    "tsr_h2d_window_nbytes", None, "Sampler: most bytes of copies to devices under way at once.", 1
)
flags.DEFINE_integer(
    "tsr_max_host_nbytes", None, "Most bytes of host memory for versions, in each process.", 1
)
flags.DEFINE_integer(
    "tsr_max_device_nbytes", None, "Sampler: most bytes of params on one device.", 1
)
flags.DEFINE_bool("tsr_insecure", None, "Use NICs beyond loopback without a token.")
flags.DEFINE_enum(
    "tsr_agent",
    None,
    ["auto", "process", "colocated"],
    "Where the data path runs: in agents on the hosts of the devices (colocated), or here.",
)
flags.DEFINE_string("tsr_trace", None, "File for a Chrome trace of each sync.")
flags.DEFINE_string("tsr_tls_certificate", None, "PEM file: this end's certificate, for TLS.")
flags.DEFINE_string("tsr_tls_key", None, "PEM file: the private key of --tsr_tls_certificate.")
flags.DEFINE_string("tsr_tls_ca", None, "PEM file: authorities that vouch for the other end.")
flags.DEFINE_string(
    "tsr_tls_server_name", None, "Name in the coordinator's certificate; default: its host."
)


def connect_options(
    connect: Callable[..., Any], flag_values: flags.FlagValues = flags.FLAGS
) -> dict[str, Any]:
    """The keyword arguments of `connect` that flags were given for.

    Args:
        connect: `connect_trainer` or `connect_sampler`; flags that it does not take are left out.
        flag_values: parsed flags.
    """
    given = {
        name.removeprefix(_PREFIX): flag_values[name].value
        for name in flag_values
        if name.startswith(_PREFIX) and flag_values[name].value is not None
    }
    tls = {name: given.pop(f"tls_{name}") for name in _TLS if f"tls_{name}" in given}
    if tls:
        given["tls"] = TLS(**tls)
    return {name: given[name] for name in inspect.signature(connect).parameters if name in given}
