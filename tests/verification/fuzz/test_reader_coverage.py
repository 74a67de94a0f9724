"""No reader of outside input is left out: code that reads, and RPC methods, compared with the targets."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verification.fuzz import agent_sockets, calls, connections, reader_coverage, sequences
from tests.verification.fuzz.runner import run
from tests.verification.fuzz.targets import all_targets

from cotenant.security.permissions import ROLES

SERVERS = {*calls.NAMES, connections.NAME, agent_sockets.NAME, sequences.NAME}


@pytest.mark.deep
def test_every_reader_is_reached_by_a_target_or_excused(tmp_path_factory: pytest.TempPathFactory) -> None:
    reached: set[str] = set()
    with reader_coverage.reaching(reached):
        for target in all_targets():
            run(target, 0, 1, tmp_path_factory.mktemp("target"))
    reads = set(reader_coverage.readers())
    left_out = reads - reached - reader_coverage.EXCUSED.keys()
    unseen = sorted(one for one in left_out if one.partition(":")[0] not in reader_coverage.BY_SERVERS)
    assert not unseen, f"these readers are not fuzzed: {unseen}; give them a target in tests/verification/fuzz"
    assert reader_coverage.EXCUSED.keys() <= reads
    assert reader_coverage.BY_SERVERS.keys() <= {one.partition(":")[0] for one in reads - reached}
    assert set(reader_coverage.BY_SERVERS.values()) <= SERVERS


def test_every_method_is_called() -> None:
    fuzzed = {f"/{method.containing_service.full_name}/{method.name}": method for method in calls.methods()}
    assert fuzzed.keys() == {path for path in ROLES if path.startswith("/cotenant.")}
    assert {method.containing_service.name for method in fuzzed.values()} <= calls.SERVED_BY.keys()


def test_readers_of_every_kind_are_found(tmp_path: Path) -> None:
    code = """
class A:
    def one(self): return [json.loads(x) for x in y]
    def two(self): return path.open()
    def three(self): path.open("w")
    def four(self): os.open(x, os.O_WRONLY)
    async def five(self): await (lambda: StoredJob.FromString(x))()
"""
    assert list(reader_coverage.found_in(code)) == ["A.one", "A.two", "A.five"]
