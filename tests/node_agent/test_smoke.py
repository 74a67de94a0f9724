from tests.node_agent.conftest import RunningAgent
from tests.node_agent.jobs import shell
from tests.node_agent.placement import Placement


async def test_a_job_runs_and_its_end_is_told(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("hello", "echo hi; exit 3"))
    end = await placement.ended("hello")
    assert end.exit.code == 3
    print(end, placement.states("hello"))
    print(placement.hellos)
