"""Which placement leaders an agent obeys, and that it still knows after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from tests.unit.node_agent.conditions import until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control import leader_check
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.node_agent.control.leader_check import LeaderCheck
from cotenant.node_agent.supervisor.lease import Lease


async def test_a_term_is_written_once_the_disk_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_check, "RETRY_SECONDS", 0.01)
    journal, tries = tmp_path / "fence.jsonl", []
    fence = EpochFence(journal, "n1")
    append = fence._append

    def read_only(lines: list[str]) -> None:
        tries.append(lines)
        if len(tries) <= 3:
            raise OSError(30, "Read-only file system")
        append(lines)

    monkeypatch.setattr(fence, "_append", read_only)
    leader = LeaderCheck("n1", fence, Lease(str(tmp_path / "lease")))
    with structlog.testing.capture_logs() as logs:
        assert leader.accepts(agent_pb2.Welcome(term=5))
        assert leader.accepts(agent_pb2.Welcome(term=7))
        await until(lambda: EpochFence(journal, "n1").term == 7)
    assert len(tries) == 4, "messages in the meantime begin no second series of tries"
    assert [line["event"] for line in logs].count("term_write_failed") == 3
    assert not LeaderCheck("n1", EpochFence(journal, "n1"), Lease(str(tmp_path / "lease"))).accepts(
        agent_pb2.Welcome(term=6)
    )
    await leader.close()
