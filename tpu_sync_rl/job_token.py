"""The secret that the programs of a job share, from wherever each of them has it."""

import os
from pathlib import Path


def resolve_token(token: str | bytes | None) -> bytes:
    """The token as bytes: the argument, else TSR_TOKEN, else what the file TSR_TOKEN_FILE holds.

    White space around it, such as the line end that editors and `echo` leave, is no part of it,
    wherever it comes from. b"" where there is none.

    Raises:
        ValueError: the token is empty or has a NUL byte, or its file can't be read.
        TypeError: it is neither str nor bytes.
    """
    if token is None:
        token = os.environb.get(b"TSR_TOKEN")
    if token is None:
        path = os.environ.get("TSR_TOKEN_FILE")
        if path is None:
            return b""
        try:
            token = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"TSR_TOKEN_FILE={path}: {error.strerror}") from error
    if not isinstance(token, str | bytes):
        raise TypeError(f"token must be a str or bytes, not a {type(token).__name__}")
    secret = (token.encode() if isinstance(token, str) else token).strip()
    if not secret:
        raise ValueError("the token is empty; leave it out to use loopback without one")
    if b"\0" in secret:
        raise ValueError("the token has a NUL byte, which no environment variable can hold")
    return secret
