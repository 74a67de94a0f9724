"""Issues certificates for all machines with `cotenant certs`: `python -m tests.verification.chaos.certificates DIR`.

They are issued with the clock set far back, so they stay valid however a part's clock jumps.
"""

from __future__ import annotations

import json
import os
import ssl
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT
from tests.verification.chaos.name_server import DOMAIN

from cotenant.rpc.endpoints import MESH_NAME
from cotenant.security.certificates import CA_CERT, Authority
from cotenant.security.subjects import Subject
from cotenant.security.tls_files import TlsFiles
from cotenant.security.validity import LEAF_DAYS

DAY_SECONDS = 86_400
AGO_SECONDS = 180 * DAY_SECONDS
CLOCK = "COTENANT_CHAOS_CLOCK"
FILES = ("CA", "CERT", "KEY")
CERTS = "certs"
TENANTS = {"red": "user/ann?tenants=red", "blue": "user/bob?tenants=blue"}  # tenants and their users
FLAGS = ("trusted-ca-file", "cert-file", "key-file", "client-cert-auth")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificates by subject, for mutual TLS between parts."""

    directory: Path
    bearers: Mapping[str, str]  # subject by machine

    def issue(self, addresses: Mapping[str, str], clock: Path | None) -> None:
        """Create an authority, and a certificate for each machine."""
        self.directory.mkdir()
        self._issue(addresses, clock, -AGO_SECONDS)

    def reissue(
        self, machine: str, addresses: Mapping[str, str], clock: Path, expires_after_seconds: int | None = None
    ) -> None:
        """Rotate one machine's certificate: as at first, or to one that expires soon."""
        if expires_after_seconds is None:
            self._issue({machine: addresses[machine]}, clock, -AGO_SECONDS, LEAF_DAYS)
        else:
            self._issue({machine: addresses[machine]}, clock, expires_after_seconds - DAY_SECONDS, 1)

    def _issue(self, addresses: Mapping[str, str], clock: Path | None, by_seconds: int, days: int = 0) -> None:
        offset = self.directory / "clock"
        offset.write_bytes(struct.pack("=q", by_seconds * 10**9))
        variables = {"LD_PRELOAD": str(clock), CLOCK: str(offset)} if clock else {}  # else clocks cannot jump
        wanted = {self.bearers[name]: [address, MESH_NAME, f"{name}.{DOMAIN}"] for name, address in addresses.items()}
        command = [sys.executable, "-m", "tests.verification.chaos.certificates", str(self.directory), str(days)]
        environment = variables | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, input=json.dumps(wanted), text=True, check=True, env=environment)

    def files(self, machine: str) -> tuple[str, str, str]:
        """Return the authority's certificate, the machine's, and its key."""
        stem = Subject.parse(self.bearers[machine]).file_stem
        return str(self.directory / CA_CERT), str(self.directory / f"{stem}.pem"), str(self.directory / f"{stem}.key")

    def variables(self, machine: str) -> dict[str, str]:
        """Return the environment that passes the files to our parts, and to their etcd clients."""
        named = zip(FILES, self.files(machine), strict=True)
        return {f"COTENANT_{whose}_{name}": path for name, path in named for whose in ("TLS", "ETCD")}

    def flags(self, machine: str) -> Sequence[str]:
        """Return the same as options for a member of etcd, for clients and peers."""
        values = (*self.files(machine), "true")
        options = dict(zip(FLAGS, values, strict=True))
        return [f"--{whose}{name}={value}" for whose in ("", "peer-") for name, value in options.items()]

    def context(self, machine: str) -> ssl.SSLContext:
        """Return the same as a TLS context for HTTP requests to etcd."""
        ca, cert, key = self.files(machine)
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(cert, key)
        return context


def of_tenants(directory: Path) -> dict[str, TlsFiles]:
    """Return the certificate of each tenant's user; empty without TLS."""
    certs = directory / CERTS
    stems = {tenant: Subject.parse(subject).file_stem for tenant, subject in TENANTS.items()}
    return {
        tenant: TlsFiles(certs / CA_CERT, certs / f"{stem}.pem", certs / f"{stem}.key")
        for tenant, stem in stems.items()
        if certs.exists()
    }


def of_process() -> TlsFiles | None:
    """Return the files that this process's environment names."""
    named = [os.environ.get(f"COTENANT_TLS_{name}", "") for name in FILES]
    ca, cert, key = map(Path, named)
    return TlsFiles(ca, cert, key) if all(named) else None


def main(directory: Path, days: int) -> None:
    """Issue certificates from standard input: by subject, its host names. Create an authority if `days` is 0."""
    authority = Authority(directory)
    if not days:
        authority.create()
    for subject, names in json.load(sys.stdin).items():
        whose = Subject.parse(subject)
        authority.issue(whose, names if whose.serves else [], days or LEAF_DAYS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
