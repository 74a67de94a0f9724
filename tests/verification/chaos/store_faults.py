"""Faults of the whole of etcd: full, restored from the past, or replaced; and their repair, as by an operator."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any

import grpc
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used
from tests.support.etcd_server import etcd_binary
from tests.verification.chaos.mesh import Mesh
from tests.verification.chaos.plan import CLIENT, MEMBERS, Fault, Step
from tests.verification.chaos.recorder import BALLAST

from cotenant.rpc.endpoints import MESH_NAME

End = Callable[[], bool]
MIB = 1 << 20
NO_SPACE = "space exceeded"  # as etcd words it
CALL_SECONDS, MENDED_SECONDS_MAX, PAUSE_SECONDS = 5.0, 60.0, 0.2
LATE_ALARM_SECONDS = 8.0  # a member proposes an alarm for up to 7 s, while others may have been disarmed already
KEPT_SECONDS = 2.0  # of history before the snapshot that is restored
MESSAGE_OPTIONS = (("grpc.ssl_target_name_override", MESH_NAME),)


@dataclass
class BackgroundWork:
    """Work in a background thread. `stop` asks it to end; `did` and `wrong` are its results."""

    stop: threading.Event = field(default_factory=threading.Event)
    did: bool = False
    wrong: str = ""
    thread: threading.Thread | None = None

    def start(self, work: Callable[[BackgroundWork], None]) -> BackgroundWork:
        """Start the work."""
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="store")
        self.thread.start()
        return self

    def _run(self, work: Callable[[BackgroundWork], None]) -> None:
        try:
            work(self)
        except (grpc.RpcError, OSError, subprocess.CalledProcessError) as error:
            self.wrong = f"the store could not be repaired: {error}"

    def is_over(self) -> bool:
        """Return whether it has ended."""
        return self.thread is None or not self.thread.is_alive()


class StoreFaults:
    """Faults of all of etcd. `seen_revision` is the revision up to which commits are recorded."""

    def __init__(self, mesh: Mesh, seen_revision: Callable[[], int]) -> None:
        self._mesh, self._seen_revision = mesh, seen_revision
        self._works: list[BackgroundWork] = []
        self._busy = False  # one such fault at a time

    def begin(self, step: Step) -> End | bool:
        """Begin a fault; return how to end it, or False while another such fault lasts."""
        if self._busy or not all(work.is_over() for work in self._works):
            return False
        self._busy = True
        return self._fill() if step.fault is Fault.FULL_STORE else self._regress(step)

    def is_mended(self) -> bool:
        """Return whether all repairs are complete."""
        return not self._busy and all(work.is_over() for work in self._works)

    def take_wrong(self) -> list[str]:
        """Return failures; each only once."""
        over = [work for work in self._works if work.is_over()]
        self._works = [work for work in self._works if not work.is_over()]
        return [work.wrong for work in over if work.wrong]

    # Full ----------------------------------------------------------------------------------------------------

    def _fill(self) -> End:
        filling = BackgroundWork().start(self._put_ballast)
        self._works.append(filling)

        def end() -> bool:
            filling.stop.set()
            if filling.thread:
                filling.thread.join()
            self._works.append(BackgroundWork().start(self._free))
            self._busy = False
            return filling.did

        return end

    def _put_ballast(self, work: BackgroundWork) -> None:
        """Write ballast keys until etcd is full; continue if the mesh frees space."""
        numbers, members = count(), cycle(MEMBERS)
        while not work.stop.is_set():
            with suppress(grpc.RpcError), self._channel(next(members)) as channel:
                self._put_over(channel, numbers, work)
            work.stop.wait(PAUSE_SECONDS)

    @staticmethod
    def _put_over(channel: grpc.Channel, numbers: Iterator[int], work: BackgroundWork) -> None:
        while not work.stop.is_set():
            request = rpc.PutRequest(key=f"{BALLAST}{next(numbers)}".encode(), value=os.urandom(MIB))
            try:
                rpc.KVStub(channel).Put(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if NO_SPACE not in str(error):
                    raise
                work.did = True
                work.stop.wait(PAUSE_SECONDS)

    def _free(self, work: BackgroundWork) -> None:
        """Delete the ballast, compact, defragment, and disarm the alarms."""
        deadline = time.monotonic() + MENDED_SECONDS_MAX
        ballast = rpc.DeleteRangeRequest(
            key=BALLAST.encode(), range_end=(BALLAST[:-1] + chr(ord(BALLAST[-1]) + 1)).encode()
        )
        gone = self._call_until_answered(
            deadline, lambda channel: rpc.KVStub(channel).DeleteRange(ballast, timeout=CALL_SECONDS)
        )
        while self._seen_revision() < gone.header.revision and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)  # compacted history cannot be recorded
        seen = rpc.CompactionRequest(revision=self._seen_revision(), physical=True)
        with suppress(grpc.RpcError):  # the mesh may have compacted further
            self._call(lambda channel: rpc.KVStub(channel).Compact(seen, timeout=CALL_SECONDS))
        self._disarm(deadline)

    def _disarm(self, deadline: float) -> None:
        """Defragment all members and disarm their alarms, again while one is raised: until no late one can follow.

        A member raises its alarm again until it is small; it may be cut off now, or compact only later.
        """
        disarm = rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, alarm=rpc.NOSPACE)
        self._defragment()
        disarmed_time = time.monotonic()
        while time.monotonic() < disarmed_time + LATE_ALARM_SECONDS:
            alarms = self._call_until_answered(
                deadline,
                lambda channel: rpc.MaintenanceStub(channel).Alarm(
                    rpc.AlarmRequest(action=rpc.AlarmRequest.GET), timeout=CALL_SECONDS
                ),
            )
            if alarms.alarms:
                self._defragment()
            for alarm in alarms.alarms:
                disarm.memberID = alarm.memberID
                self._call_until_answered(
                    deadline, lambda channel: rpc.MaintenanceStub(channel).Alarm(disarm, timeout=CALL_SECONDS)
                )
                disarmed_time = time.monotonic()
            time.sleep(PAUSE_SECONDS)

    def _defragment(self) -> None:
        for member in MEMBERS:
            with suppress(grpc.RpcError):  # it may be down or cut off
                self._call(
                    lambda channel: rpc.MaintenanceStub(channel).Defragment(
                        rpc.DefragmentRequest(), timeout=CALL_SECONDS
                    ),
                    [member],
                )

    def _call_until_answered(self, deadline: float, ask: Callable[[grpc.Channel], Any]) -> Any:
        while True:
            try:
                return self._call(ask)
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_SECONDS)

    def _call(self, ask: Callable[[grpc.Channel], Any], members: Sequence[str] = MEMBERS) -> Any:
        """Call the first member that answers; raise the last error."""
        for name in members:
            try:
                with self._channel(name) as channel:
                    return ask(channel)
            except grpc.RpcError as error:
                last = error
        raise last

    @contextmanager
    def _channel(self, name: str) -> Any:
        endpoint, own = self._mesh.address(name), self._mesh.certificates
        if own is None:
            with grpc.insecure_channel(endpoint) as channel:
                yield channel
            return
        ca, cert, key = (Path(path).read_bytes() for path in own.files(CLIENT))
        with grpc.secure_channel(
            endpoint, grpc.ssl_channel_credentials(ca, key, cert), options=MESSAGE_OPTIONS
        ) as channel:
            yield channel

    # Older, or another one -----------------------------------------------------------------------------------

    def _regress(self, step: Step) -> End:
        """Start members with other data, some time after a snapshot; the original data is restored at the end."""
        snapshot = self._mesh.directory / f"snapshot-{step.number}"
        swapped = BackgroundWork()

        def work(own: BackgroundWork) -> None:
            if step.fault is Fault.OLD_STORE:
                self._save(snapshot)
                if own.stop.wait(KEPT_SECONDS):
                    return
            self._mesh.kill(*MEMBERS)
            for name in MEMBERS:
                self._data(name).rename(self._aside(name))
                if step.fault is Fault.OLD_STORE:
                    self._restore(name, snapshot)
            self._mesh.bring_back(*MEMBERS)
            own.did = True

        self._works.append(swapped.start(work))

        def end() -> bool:
            swapped.stop.set()
            if swapped.thread:
                swapped.thread.join()
            if any(self._aside(name).exists() for name in MEMBERS):
                self._mesh.kill(*MEMBERS)
                for name in MEMBERS:
                    shutil.rmtree(self._data(name), ignore_errors=True)
                    self._aside(name).rename(self._data(name))
                self._mesh.bring_back(*MEMBERS)
            self._busy = False
            return swapped.did

        return end

    def _data(self, name: str) -> Path:
        return self._mesh.machines.all[name].disk / name

    def _aside(self, name: str) -> Path:
        return self._mesh.machines.all[name].disk / f"{name}.aside"

    def _save(self, file: Path) -> None:
        def ask(channel: grpc.Channel) -> None:
            with file.open("wb") as snapshot:
                for part in rpc.MaintenanceStub(channel).Snapshot(rpc.SnapshotRequest(), timeout=CALL_SECONDS):
                    snapshot.write(part.blob)

        self._call(ask)

    def _restore(self, name: str, snapshot: Path) -> None:
        binary = etcd_binary()
        members = [part.member for part in self._mesh.parts.values() if part.member]
        (own,) = (member for member in members if member.name == name)
        assert binary
        subprocess.run(
            [
                *(str(Path(binary).with_name("etcdutl")), "snapshot", "restore", str(snapshot), f"--name={name}"),
                f"--data-dir={self._data(name)}",
                f"--initial-advertise-peer-urls={own.peer_url}",
                f"--initial-cluster={','.join(f'{member.name}={member.peer_url}' for member in members)}",
            ],
            check=True,
            capture_output=True,
        )
