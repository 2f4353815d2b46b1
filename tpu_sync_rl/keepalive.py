"""How the ends of a control stream notice that the other one is gone, though nothing is said."""


def keepalive_options(peer_timeout_s: float) -> list[tuple[str, int | str]]:
    """Options of gRPC, for both ends, by which a peer is lost that is silent for so long.

    Pings are answered by gRPC's own threads: a held GIL is no death, a stopped process is.
    """
    return [
        ("grpc.keepalive_time_ms", int(1000 * peer_timeout_s / 3)),
        ("grpc.keepalive_timeout_ms", int(1000 * peer_timeout_s / 2)),
        ("grpc.http2.ping_timeout_ms", int(1000 * peer_timeout_s / 2)),  # else a minute
        ("grpc.http2.max_pings_without_data", 0),
    ]
