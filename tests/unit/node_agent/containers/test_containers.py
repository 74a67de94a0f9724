"""Jobs in real containers, run by the process runtime: what they see, and that all else is as without an image."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.support.images import layer_of_directory, make_root, need_containers, write_layout
from tests.unit.node_agent.conditions import alive, need_groups, until
from tests.unit.node_agent.jobs import CPUS, NODE, assignment, task

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.process_runtime import ProcessRuntime
from cotenant.node_agent.runtime.runtime_port import RuntimeContext, SessionCommand
from cotenant.v1 import job_pb2, resources_pb2

pytestmark = pytest.mark.root


class Node:
    """A runtime on a state directory, and the statuses that it has reported."""

    def __init__(self, state_dir: Path) -> None:
        self.told: list[Status] = []
        self.runtime = ProcessRuntime()
        cores = [resources_pb2.Core(id=cpu, cpus=[cpu]) for cpu in CPUS]
        inventory = resources_pb2.Inventory(cores=cores, memory_bytes=1 << 33)
        inventory.gpus.add(uuid="GPU-1", declared=True)
        inventory.gpus.add(uuid="GPU-2", declared=True)
        self.context = RuntimeContext(
            NODE, state_dir, inventory, 1 << 20, 10, 1e9, users={"ada": "nobody"}, cdi_directories=(state_dir / "cdi",)
        )

    async def open(self) -> None:
        await self.runtime.open(self.context, self.told.append)

    async def in_state(self, key: AttemptKey, wanted: Callable[[Status], bool]) -> Status:
        def find() -> Status | None:
            return next((one for one in self.told if one.key == key and wanted(one)), None)

        found = await until(find)
        assert found
        return found

    async def run(self, job: agent_pb2.Assignment) -> tuple[Status, str]:
        """Run a job to its end; return its last status and its output."""
        await self.runtime.launch(job)
        key = AttemptKey(job.job_id, job.number)
        status = await self.in_state(key, lambda one: one.ended)
        return status, self.output(key)

    async def start(self, job: agent_pb2.Assignment, says: str = "ready") -> Status:
        """Start a job; return its status once it runs and has said something."""
        await self.runtime.launch(job)
        key = AttemptKey(job.job_id, job.number)
        status = await self.in_state(key, lambda one: one.state != "STARTING")
        await until(lambda: says in self.output(key))
        return status

    def output(self, key: AttemptKey) -> str:
        directory = self.runtime.output_directory(key)
        path = directory / "output-0.log" if directory else Path("/nowhere")
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """An unpacked image that every user may read: pytest's own directories are root's alone."""
    need_containers()
    need_groups("cpuset", "memory")
    with tempfile.TemporaryDirectory(prefix="cotenant-test-") as place:
        Path(place).chmod(0o755)
        yield make_root(Path(place) / "root")


@pytest.fixture
async def node(tmp_path: Path, image: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await node.open()
    yield node
    for key in {status.key for status in node.told}:
        node.runtime.stop(key, 0)
        await node.in_state(key, lambda one: one.ended)
        await node.runtime.forget(key)
    await node.runtime.close()
    assert not left_mounts(tmp_path)


def left_mounts(below: Path) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(below) in line]


def job(name: str, script: str, image: str | Path, *, submitter: str = "", **more: object) -> agent_pb2.Assignment:
    reference = image if isinstance(image, str) else f"dir:{image}"
    spec = job_pb2.JobSpec(container=job_pb2.Container(image=reference), environment={"COLOR": "red"})
    made = assignment(name, ["sh", "-c", script], spec=spec, **more)  # type: ignore[arg-type]  # passed on
    made.submitter = submitter
    return made


async def test_a_job_sees_its_image_its_folder_and_its_limits(node: Node, image: Path) -> None:
    script = (
        "cat /etc/issue; pwd; ls /; env; cat /proc/self/cgroup; grep -E 'CapEff|NoNew' /proc/self/status; echo kept > f"
    )
    status, output = await node.run(job("a", script, image, tasks=[task(cpus=CPUS[:1], memory_bytes=1 << 26)]))
    assert (status.state, status.message) == ("SUCCEEDED", "")
    folder = node.context.state_dir / "attempts/a-1/work"
    assert "made for a test" in output
    assert str(folder) in output.splitlines()
    assert not {"home", "root", "usr"} & set(output.splitlines())
    assert {"COLOR=red", "RANK=0", f"HOME={folder}"} <= set(output.splitlines())
    assert f"/cotenant/{NODE}/a-1/task-0" in output
    assert "NoNewPrivs:\t1" in output
    assert "CapEff:\t0000000000000000" in output
    assert (folder / "f").read_text() == "kept\n"


async def test_what_a_job_writes_outside_of_its_folder_is_gone(node: Node, image: Path) -> None:
    status, output = await node.run(job("a", "echo x > /etc/issue && echo y > /new && cat /etc/issue /new", image))
    assert (status.state, output) == ("SUCCEEDED", "x\ny\n")
    assert (image / "etc/issue").read_text() == "made for a test\n"
    assert not (image / "new").exists()
    await node.runtime.forget(status.key)
    assert not (node.context.state_dir / "kept/a-1/containers").exists()


async def test_the_end_of_a_program_is_told_as_without_an_image(node: Node, image: Path) -> None:
    status, _ = await node.run(job("code", "exit 3", image))
    assert status.message == "rank 0 ended with status 3"
    status, _ = await node.run(job("signal", "kill -9 $$", image))
    assert status.message == "rank 0 was ended by signal 9 (Killed)"
    status, _ = await node.run(job("early", "true", image))
    assert status.state == "SUCCEEDED"


async def test_a_stop_warns_all_processes_of_the_program(node: Node, image: Path) -> None:
    inner = 'trap "echo inner; exit" TERM; echo ready; while true; do sleep 0.1; done'
    script = f"sh -c '{inner}' & trap 'wait; exit 0' TERM; wait"
    await node.start(job("a", script, image))
    key = AttemptKey("a", 1)
    node.runtime.stop(key, 20)
    status = await node.in_state(key, lambda one: one.ended)
    assert status.state == "STOPPED"
    assert "inner" in node.output(key)


async def test_what_cannot_run_is_told_by_name(node: Node, image: Path) -> None:
    wrong = job("wrong", "", image)
    wrong.spec.command[:] = ["no-such-program"]
    status, _ = await node.run(wrong)
    assert (status.state, status.message) == ("FAILED", "rank 0: command not found in the image: no-such-program")
    status, _ = await node.run(job("missing", "true", "dir:/no/such/image"))
    assert (status.state, status.launch_cause) == ("NOT_LAUNCHED", "image")
    assert "the image /no/such/image cannot be opened: No such file or directory" in status.message


async def test_a_job_runs_as_its_user_and_reaches_no_more_than_they_do(node: Node, image: Path, tmp_path: Path) -> None:
    status, output = await node.run(job("a", "id; echo mine > f", image, submitter="ada"))
    assert (status.state, output.partition("(")[0].split()[0]) == ("SUCCEEDED", f"uid={nobody()}")
    private = tmp_path / "private"
    shutil.copytree(image, private / "root", symlinks=True)
    private.chmod(0o700)
    status, _ = await node.run(job("b", "true", private / "root", submitter="ada"))
    assert status.launch_cause == "image"
    assert "Permission denied" in status.message


def nobody() -> int:
    return pwd.getpwnam("nobody").pw_uid


async def test_a_command_beside_the_program_is_in_its_container(node: Node, image: Path) -> None:
    await node.start(job("a", "echo here > /tmp/mark; echo ready; sleep 60", image, submitter="ada"))
    script = "cat /tmp/mark; pwd; id; cat /proc/self/cgroup; grep -E 'CapBnd' /proc/self/status"
    session = await node.runtime.open_session(AttemptKey("a", 1), SessionCommand(("sh", "-c", script), 0))
    await session.started()
    assert await session.ended() == (0, 0)
    os.set_blocking(session.output, True)
    said = os.read(session.output, 1 << 16).decode()
    await session.close()
    assert said.startswith(f"here\n{node.context.state_dir}/attempts/a-1/work\nuid={nobody()} ")
    assert "/a-1/task-0" in said
    assert "CapBnd:\t0000000000000000" in said


async def test_the_cores_of_a_running_container_change(node: Node, image: Path) -> None:
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    status = await node.start(job("a", "echo ready; sleep 60", image, tasks=[task(cpus=CPUS[:1])]))
    assert status.state == "RUNNING"
    pid = program_of(node, "a")
    assert os.sched_getaffinity(pid) == set(CPUS[:1])
    more = job("a", "echo ready; sleep 60", image, tasks=[task(cpus=CPUS[:2])], epoch=11)
    assert await node.runtime.adopt(more) is None
    assert os.sched_getaffinity(pid) == set(CPUS[:2])


def program_of(node: Node, name: str) -> int:
    """Return the pid of a job's program."""
    procs = Path(f"/sys/fs/cgroup/memory/cotenant/{NODE}/{name}-1/task-0/cgroup.procs")
    if not procs.exists():
        pytest.skip("needs version 1 of control groups at their usual place")
    return int(procs.read_text().split()[0])


async def test_a_container_outlives_its_agent_and_is_adopted(node: Node, image: Path) -> None:
    await node.start(job("a", "trap 'echo bye; exit 0' TERM; echo ready; while true; do sleep 0.1; done", image))
    await node.runtime.close()
    node.runtime, node.told = ProcessRuntime(), []
    found = await node.runtime.open(node.context, node.told.append)
    assert [(one.status.key.job_id, one.status.state) for one in found] == [("a", "RUNNING")]
    node.told.extend(one.status for one in found)
    node.runtime.stop(AttemptKey("a", 1), 20)
    status = await node.in_state(AttemptKey("a", 1), lambda one: one.ended)
    assert status.state == "STOPPED"
    assert "bye" in node.output(status.key)


async def test_nothing_of_a_container_outlives_a_killed_supervisor(node: Node, image: Path) -> None:
    status = await node.start(job("a", "sleep 60 & echo ready; sleep 60", image))
    pid = program_of(node, "a")
    os.kill(status.pid, signal.SIGKILL)
    status = await node.in_state(status.key, lambda one: one.ended)
    assert status.state == "FAILED"
    await until(lambda: not alive(pid))
    assert not Path(f"/sys/fs/cgroup/memory/cotenant/{NODE}/a-1").exists()  # noqa: ASYNC240 - a moment


async def test_a_stop_during_the_launch_leaves_nothing(node: Node, image: Path) -> None:
    launching = asyncio.create_task(node.runtime.launch(job("a", "sleep 60", image)))
    await asyncio.sleep(0)
    node.runtime.stop(AttemptKey("a", 1), 0)
    await launching
    status = await node.in_state(AttemptKey("a", 1), lambda one: one.ended)
    assert status.state == "STOPPED"


async def test_an_image_of_a_layout_brings_its_variables_and_its_command(
    node: Node, image: Path, tmp_path: Path
) -> None:
    config = {"Env": ["PATH=/bin", "COLOR=blue", "SIZE=big"], "Entrypoint": ["sh", "-c"], "Cmd": ["echo $COLOR $SIZE"]}
    layout = write_layout(tmp_path / "layout", [layer_of_directory(image)], config=config)
    made = job("a", "", f"oci:{layout}:v1")
    made.spec.ClearField("command")
    status, output = await node.run(made)
    assert (status.state, output) == ("SUCCEEDED", "red big\n")
    assert node.runtime._images_in_use() != [""]
    (cached,) = (node.context.state_dir / "images").iterdir()
    await node.runtime.forget(status.key)
    assert cached.exists()
    bare = job("b", "", image)
    bare.spec.ClearField("command")
    status, _ = await node.run(bare)
    assert (status.launch_cause, status.message) == ("image", "the job has no command, and its image has none either")


async def test_a_job_starts_in_the_folder_of_its_submission(node: Node, image: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text("content\n")
    found = folder.stat()
    made = job("a", "pwd; cat train.py; echo $COTENANT_SUBMIT_DIR; echo new > made", image)
    made.spec.submit_directory.MergeFrom(
        job_pb2.SubmitDirectory(path=str(folder), inode=found.st_ino, owner_uid=found.st_uid)
    )
    _, output = await node.run(made)
    assert output == f"{folder}\ncontent\n{folder}\n"
    assert (folder / "made").read_text() == "new\n"
    folder.chmod(0o700)
    made.job_id, made.submitter = "b", "ada"  # whose user may not enter it
    _, output = await node.run(made)
    assert output.startswith(f"cotenant: this node does not have the folder {folder}: Permission denied")


CDI = """\
cdiVersion: 0.6.0
kind: example.com/gpu
devices:
- {name: GPU-1, containerEdits: {deviceNodes: [{path: /dev/fake1, hostPath: /dev/null}]}}
- {name: GPU-2, containerEdits: {deviceNodes: [{path: /dev/fake2, hostPath: /dev/zero}]}}
containerEdits:
  env: [DRIVER=fake]
  deviceNodes: [{path: /dev/fakectl, hostPath: /etc/hostname}]
  mounts: [{hostPath: /etc/hosts, containerPath: /opt/driver/lib.so, options: [ro, bind]}]
  hooks: [{hookName: createContainer, path: /bin/sh, args: [sh, -c, "cat > HOOK.state; echo hooked > HOOK"]}]
"""


def on_gpus(made: agent_pb2.Assignment, *uuids: str) -> agent_pb2.Assignment:
    for uuid in uuids:
        made.allocation.tasks[0].gpus.add(uuid=uuid, milli=1000)
    return made


async def test_a_container_gets_exactly_its_gpus_by_the_cdi_spec(node: Node, image: Path, tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    spec = tmp_path / "cdi/fake.yaml"
    spec.write_text(CDI.replace("HOOK", str(tmp_path / "hook")))
    spec.chmod(0o644)
    status, output = await node.run(on_gpus(job("a", "ls /dev; echo $DRIVER $CUDA_VISIBLE_DEVICES", image), "GPU-2"))
    assert (status.state, status.message) == ("SUCCEEDED", "")
    assert {"fake2", "fakectl", "fake GPU-2"} <= set(output.splitlines())
    assert "fake1" not in output
    assert (tmp_path / "hook").read_text() == "hooked\n"
    script = "cat /dev/fake1; cat /opt/driver/lib.so /dev/fakectl; echo x > /dev/fake1"
    status, output = await node.run(on_gpus(job("b", script, image, submitter="ada"), "GPU-1"))
    assert (status.state, status.message) == ("SUCCEEDED", "")
    assert output == "".join(Path(path).read_text() for path in ("/etc/hosts", "/etc/hostname"))  # noqa: ASYNC240 - small
    spec.write_text("kind: [")
    node.context.inventory.gpus[0].declared = False
    status, _ = await node.run(on_gpus(job("c", "true", image), "GPU-1"))
    assert (status.state, status.launch_cause) == ("NOT_LAUNCHED", "device")
    assert "fake.yaml cannot be used: line" in status.message
    assert "fake.yaml" in node.context.inventory.container_gpus_missing


async def test_a_spec_that_is_written_while_the_agent_runs_counts(node: Node, tmp_path: Path) -> None:
    assert not await node.runtime.refresh_container_gpus()
    node.context.inventory.gpus[0].declared = False
    (tmp_path / "cdi").mkdir()
    spec = tmp_path / "cdi/fake.yaml"
    spec.write_text("kind: [")
    assert await node.runtime.refresh_container_gpus()
    assert "fake.yaml" in node.context.inventory.container_gpus_missing
    assert not await node.runtime.refresh_container_gpus()
    spec.write_text(CDI)
    spec.chmod(0o644)
    assert await node.runtime.refresh_container_gpus()
    assert not node.context.inventory.container_gpus_missing


async def test_a_container_mounts_what_its_user_reaches_and_no_more(node: Node, image: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="cotenant-test-") as data:
        os.chmod(data, 0o777)
        (Path(data) / "f").write_text("content\n")
        made = job("a", "cat /mnt/data/f /one; echo more > /mnt/data/new; echo x > /ro/y", image, submitter="ada")
        for source, target, read_only in ((data, "/mnt/data", False), (f"{data}/f", "/one", True), (data, "/ro", True)):
            made.spec.container.mounts.add(source=source, target=target, read_only=read_only)
        status, output = await node.run(made)
        assert output.startswith("content\ncontent\n")
        assert "Read-only file system" in output
        assert status.message == "rank 0 ended with status 1"
        assert (Path(data) / "new").read_text() == "more\n"
        assert (Path(data) / "new").stat().st_uid == nobody()
        (Path(data) / "to-state").symlink_to(tmp_path)
        for name, source, said in (
            ("none", f"{data}/none", "No such file or directory"),
            ("state", str(tmp_path), "is private to the agent"),
            ("link", f"{data}/to-state", "is private to the agent"),
            ("around", str(tmp_path.parent), "is private to the agent"),
        ):
            made = job(name, "true", image)
            made.spec.container.mounts.add(source=source, target="/x")
            status, _ = await node.run(made)
            assert (status.state, status.launch_cause) == ("NOT_LAUNCHED", "mount"), status
            assert said in status.message
        made = job("private", "true", image, submitter="ada")
        (Path(data) / "closed").mkdir(mode=0o700)
        made.spec.container.mounts.add(source=f"{data}/closed/x", target="/x")
        status, _ = await node.run(made)
        assert status.launch_cause == "mount"
