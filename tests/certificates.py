"""Certificates for tests, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tpu_sync_rl.tls import TLS

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the openssl command is not there"
)
_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """Signs certificates; its own is `ca`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self.ca = folder / f"{name}.pem"
        _openssl("req", "-x509", *_NEW_KEY, *self._out(name), "-subj", f"/CN={name}")

    def issue(self, name: str, made_out_to: str = "IP:127.0.0.1") -> TLS:
        """A new certificate; trusts this authority."""
        tls = TLS(
            certificate=self._folder / f"{name}.pem", key=self._folder / f"{name}.key", ca=self.ca
        )
        issuer = ["-CA", str(self.ca), "-CAkey", str(self._folder / f"{self._name}.key")]
        made_out_to = f"subjectAltName={made_out_to}"
        _openssl(
            *("req", "-x509", *_NEW_KEY, *self._out(name), *issuer),
            *("-subj", f"/CN={name}", "-addext", made_out_to),
        )
        return tls

    def _out(self, name: str) -> list[str]:
        paths = ["-keyout", str(self._folder / f"{name}.key"), "-out", f"{self._folder}/{name}.pem"]
        return [*paths, "-days", "2"]


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
