"""Jobs on a machine before its power is cut; `after.py` checks the result. Both run in `make test-vm`."""

from __future__ import annotations

import pytest
from tests.unit.node_agent.conditions import until, written_number
from tests.unit.node_agent.jobs import CPUS, assignment, task
from tests.unit.node_agent.placement import Placement
from tests.verification.machines.kernel import siblings_of
from tests.verification.machines.reboot.agents import ENDED, RUNNING, STARTS, agent_on_disk

pytestmark = pytest.mark.root


async def test_the_power_is_cut_while_one_job_runs_and_another_has_ended(placement: Placement) -> None:
    agent = agent_on_disk(placement)
    await agent.start()
    await placement.connected()
    cores = sorted({min(siblings_of(cpu)) for cpu in CPUS})[-2:]
    one, other = (task(cpus=sorted(siblings_of(core)), cores=[core]) for core in cores)
    begin = f"mkdir -p {STARTS}; echo x >> {STARTS}/$COTENANT_JOB_ID; sync; "
    forever = begin + f"echo $$ > {STARTS}/pid; exec sleep 6000"
    placement.assign(
        assignment(ENDED, ["/bin/sh", "-c", begin + "exit 4"], tasks=[one]),
        assignment(RUNNING, ["/bin/sh", "-c", forever], tasks=[other]),
    )
    assert (await placement.ended(ENDED)).exit.code == 4
    await placement.running(RUNNING)
    assert await until(lambda: written_number(STARTS / "pid"))
    await agent.stop()  # its jobs run on: the power is cut under them
