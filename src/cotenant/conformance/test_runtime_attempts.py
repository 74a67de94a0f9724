"""Laws of runtimes: real programs on this machine, also over the end of an agent."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cotenant import plugins
from cotenant.conformance.runtime_node import CPUS, NODE, Node, assignment_of, opened, program, runs, until
from cotenant.core.model.lifecycle import LaunchCause
from cotenant.node_agent.runtime.attempt_status import AttemptKey

SLEEP = "import time; print('started', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
WARNED = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('warned'), sys.exit(0))); {SLEEP}"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {SLEEP!r}], stdout=subprocess.DEVNULL)
print("child", child.pid, flush=True)
"""
Story = Callable[[Node], Awaitable[None]]


def on_a_node(plugin: plugins.Plugin, state_dir: Path, *stories: Story) -> None:
    """Open the runtime once for each story, in the same state directory; only the last one leaves nothing running."""

    async def told() -> None:
        for story in stories:
            async with opened(plugin.make(), state_dir, leaves=story is not stories[-1]) as node:
                await story(node)

    asyncio.run(told())


def test_a_new_node_has_nothing_to_recover(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """A runtime that is opened in an empty directory recovers nothing, and says in sentences what it cannot enforce."""

    async def story(node: Node) -> None:
        assert node.recovered == []
        said = list(node.runtime.not_enforced())
        assert all(isinstance(one, str) and one and "\n" not in one for one in said), said

    on_a_node(plugin, tmp_path, story)


def test_an_end_is_reported_once_with_its_outcome(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """An attempt is reported as running, and its end exactly once: with success, the exit code, or the signal."""

    async def story(node: Node) -> None:
        for code, state, exit_code, number in (
            ("", "SUCCEEDED", 0, 0),
            ("import sys; sys.exit(3)", "FAILED", 3, 0),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "FAILED", 0, int(signal.SIGKILL)),
        ):
            key = await node.launch(f"job-{exit_code}-{number}", *program(code))
            ended = await node.ended(key)
            assert ended.state == state, ended.message
            assert ended.epoch == 10, "a status has the epoch of its assignment"
            if state == "FAILED":
                assert ended.exit is not None, "a failed program has an exit"
                assert (ended.exit.rank, ended.exit.code, ended.exit.signal) == (0, exit_code, number)
            await node.runtime.forget(key)
            assert len(node.ends(key)) == 1

    on_a_node(plugin, tmp_path, story)


def test_every_task_runs_with_its_rank_and_its_output(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """Each task of an attempt runs once, knows its rank, and has an output of its own that outlives it."""

    async def story(node: Node) -> None:
        key = await node.launch("gang", *program("import os; print('rank', os.environ['RANK'])"), ranks=3)
        assert (await node.ended(key)).state == "SUCCEEDED"
        assert [node.output(key, rank) for rank in range(3)] == ["rank 0\n", "rank 1\n", "rank 2\n"]
        await node.runtime.forget(key)
        assert node.output(key, 2) == "rank 2\n", "the output is kept for a while"

    on_a_node(plugin, tmp_path, story)


def test_a_failed_task_ends_its_attempt(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """If a task fails, its attempt fails with that task's rank and exit, and the other tasks are ended."""

    async def story(node: Node) -> None:
        code = f"import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); {SLEEP}"
        ended = await node.ended(await node.launch("gang", *program(code), ranks=2))
        assert ended.state == "FAILED"
        assert ended.exit is not None
        assert (ended.exit.rank, ended.exit.code) == (1, 7)

    on_a_node(plugin, tmp_path, story)


def test_a_stopped_program_is_warned_first(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """A stop warns the program, which may end by itself within the grace period; the end names the reason."""

    async def story(node: Node) -> None:
        key = await node.launch("polite", *program(WARNED))
        await until(lambda: "started" in node.output(key))
        node.runtime.stop(key, 600.0, "PREEMPTED")
        ended = await node.ended(key)
        assert (ended.state, ended.stop_reason) == ("STOPPED", "PREEMPTED")
        assert "warned" in node.output(key)

    on_a_node(plugin, tmp_path, story)


def test_a_program_that_does_not_heed_the_warning_is_killed(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """When the grace period is over, the program is killed."""

    async def story(node: Node) -> None:
        key = await node.launch("stubborn", *program(STUBBORN))
        await until(lambda: "started" in node.output(key))
        node.runtime.stop(key, 0.1)
        assert (await node.ended(key)).state == "STOPPED"

    on_a_node(plugin, tmp_path, story)


def test_a_stop_right_after_the_launch_is_carried_out(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """A stop is carried out at any time of a launch; one of an attempt that ended, or is unknown, changes nothing."""

    async def story(node: Node) -> None:
        during = asyncio.ensure_future(node.launch("during", *program(SLEEP)))
        await asyncio.sleep(0)
        node.runtime.stop(AttemptKey("during", 1), 0.1)
        after = await node.launch("after", *program(SLEEP))
        node.runtime.stop(after, 0.1)
        for key in (await during, after):
            assert (await node.ended(key)).state == "STOPPED"
            node.runtime.stop(key, 0.0)
        node.runtime.stop(AttemptKey("unknown", 1), 0.0)
        assert [len(node.ends(AttemptKey(name, 1))) for name in ("during", "after", "unknown")] == [1, 1, 0]

    on_a_node(plugin, tmp_path, story)


def test_no_process_is_left_when_an_end_is_reported(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """An end is reported only when no process of the attempt runs, also none that its program left behind."""

    async def story(node: Node) -> None:
        key = await node.launch("parent", *program(PARENT))
        await node.ended(key)
        child = int(node.output(key).split()[1])
        assert not runs(child), f"process {child}, which the program started, still runs"

    on_a_node(plugin, tmp_path, story)


def test_what_cannot_start_is_not_launched_or_failed(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """What this node cannot start is NOT_LAUNCHED with a cause and a reason; what no node could start has FAILED."""

    async def story(node: Node) -> None:
        absent = max(CPUS) + 1000
        key = await node.launch("elsewhere", *program("print('executed')"), cpus=(absent,))
        ended = await node.ended(key)
        assert ended.state == "NOT_LAUNCHED", f"CPU {absent} does not exist on this node"
        assert ended.message
        assert ended.launch_cause in {cause.value for cause in LaunchCause}
        assert "executed" not in node.output(key)
        nowhere = await node.ended(await node.launch("nowhere", "/no/such/program"))
        assert nowhere.state == "FAILED"

    on_a_node(plugin, tmp_path, story)


def test_attempts_outlive_the_agent(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """An attempt runs on when the runtime is closed; the next one recovers it, stops it, and reports its end."""
    key = AttemptKey("lasting", 1)

    async def first(node: Node) -> None:
        await node.launch(key.job_id, *program(WARNED))
        await until(lambda: "started" in node.output(key))

    async def second(node: Node) -> None:
        (found,) = node.recovered
        assert (found.status.key, found.status.ended) == (key, False)
        assert found.assignment.allocation.node_id == NODE, "it still holds what it was given"
        node.runtime.stop(key, 600.0)
        assert (await node.ended(key)).state == "STOPPED"
        assert "warned" in node.output(key)

    on_a_node(plugin, tmp_path, first, second)


def test_an_end_between_two_agents_is_recovered_until_it_is_forgotten(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """An attempt that ended is recovered with its end by each next runtime, until it is forgotten."""
    key, gate = AttemptKey("brief", 1), tmp_path / "gate"

    async def first(node: Node) -> None:
        code = f"import os, sys, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.005)\nsys.exit(5)"
        await node.launch(key.job_id, *program(code))
        await node.runs(key)

    async def second(node: Node) -> None:
        assert [one.status.key for one in node.recovered] == [key]
        gate.touch()
        await node.ended(key)

    async def third(node: Node) -> None:
        (found,) = node.recovered
        assert (found.status.state, found.status.exit and found.status.exit.code) == ("FAILED", 5)
        await node.runtime.forget(key)

    async def fourth(node: Node) -> None:
        assert node.recovered == []

    on_a_node(plugin, tmp_path / "state", first, second, third, fourth)


def test_usage_is_of_what_runs(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """The usage of a running attempt has CPU time that grows and is not negative; what does not run has none."""

    async def story(node: Node) -> None:
        assert await node.runtime.usage(AttemptKey("unknown", 1)) is None
        key = await node.launch("busy", *program("while True: pass"))
        await node.runs(key)
        seen = [0.0]
        async with asyncio.timeout(30):
            while len(seen) < 3:
                if (usage := await node.runtime.usage(key)) is not None and usage.cpu_seconds != seen[-1]:
                    assert usage.memory_bytes >= 0
                    seen.append(usage.cpu_seconds)
                await asyncio.sleep(0.01)
        assert seen == sorted(seen)
        node.runtime.stop(key, 0.0)
        await node.ended(key)
        assert await node.runtime.usage(key) is None

    on_a_node(plugin, tmp_path, story)


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_other_cores_are_adopted_or_refused_with_a_reason(plugin: plugins.Plugin, tmp_path: Path) -> None:
    """A running attempt gets all of its new cores, or keeps the old ones with a reason."""

    async def story(node: Node) -> None:
        key = await node.launch("resized", *program(SLEEP), cpus=CPUS[:2])
        await until(lambda: "started" in node.output(key))
        absent = (max(CPUS) + 1000,)
        for cpus, may_work in ((CPUS[:1], True), (absent, False), (CPUS[:2], True)):
            why = await node.runtime.adopt(assignment_of("resized", program(SLEEP), cpus=cpus))
            assert why is None if may_work and why is None else why, "a refusal has a reason"
            assert may_work or why, f"CPU {absent[0]} does not exist on this node"
        why = await node.runtime.narrow(key, 1)
        assert why is None or why
        assert await node.runtime.narrow(key, None) is None, "all cores can be given back"

    on_a_node(plugin, tmp_path, story)
