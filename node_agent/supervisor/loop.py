"""One attempt's state and the loop that drives it; see `supervisor.py`, which starts it, for the theory of operation.

The supervisor loads this file by its bare name without the package. The job waits for these imports, so they are few.
"""

from __future__ import annotations

import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from typing import Any

    from cotenant.node_agent.supervisor.cgroups import Group, GroupError
    from cotenant.node_agent.supervisor.launch_faults import NOT_LAUNCHED, cause_of, mark_executing
    from cotenant.node_agent.supervisor.lease import DisconnectLimit, boot_seconds
    from cotenant.node_agent.supervisor.outer_process import NONE, REASON, SETTLE_MILLISECONDS, OuterProcess
    from cotenant.node_agent.supervisor.output_file import OutputFile
    from cotenant.node_agent.supervisor.plain_json import dumps
    from cotenant.node_agent.supervisor.process_table import children, start_ticks
    from cotenant.node_agent.supervisor.state_file import StateFile
    from cotenant.node_agent.supervisor.stop_order import STOPPED_EXTERNALLY, read_stop_order
    from cotenant.node_agent.supervisor.task_process import (
        TaskProcess,
        adopt_orphans,
        as_float,
        as_int,
        as_list,
        exit_message,
    )
    from cotenant.node_agent.supervisor.time_limit import TimeLimit, read_changed
else:
    import _signal as signal  # their public modules build enumerations, which takes longer than all of ours
    import _socket as socket

    from cgroups import Group, GroupError
    from launch_faults import NOT_LAUNCHED, cause_of, mark_executing
    from lease import DisconnectLimit, boot_seconds
    from outer_process import NONE, REASON, SETTLE_MILLISECONDS, OuterProcess
    from output_file import OutputFile
    from plain_json import dumps
    from process_table import children, start_ticks
    from state_file import StateFile
    from stop_order import STOPPED_EXTERNALLY, read_stop_order
    from task_process import TaskProcess, adopt_orphans, as_float, as_int, as_list, exit_message
    from time_limit import TimeLimit, read_changed

KILL_ROUND_SECONDS = 0.02
NOTIFY_RETRY_SECONDS = 0.05
SAVE_RETRY_SECONDS = 1.0
WAIT_SECONDS_MAX = 86_400.0  # poll accepts at most 24 days
STATE_BYTES_PER_TASK = 256


class Supervisor:
    """The attempt's state and the loop that drives it."""

    def __init__(self, spec: dict[str, object]) -> None:
        self.spec = spec
        group = spec["group"]
        self.group = Group.from_json(group) if isinstance(group, dict) else None
        self.tasks = [self._task(task) for task in as_list(spec["tasks"])]
        self.state_file = StateFile("state.json", 2048 + STATE_BYTES_PER_TASK * len(self.tasks))
        self.phase = "STARTING"
        self.message = ""
        self.decider: TaskProcess | None = None
        self.decider_out_of_memory = False
        self.failed = False
        self.launch_cause = ""  # set if it failed before the user's program was executed
        self.stop_asked = False
        self.stop_reason = ""  # the first order's, or that of an expired limit
        self.pid_start_ticks = start_ticks(os.getpid())
        self.start_time = self.end_time = 0.0
        self.kill_rounds = 0
        self.kill_at: float | None = None  # monotonic, like the other deadlines
        self.notify_at: float | None = None
        self.save_at: float | None = None
        self.started_boot_seconds = boot_seconds()
        self.limits = self._limits()
        self.check_at = time.monotonic() if self.limits else None
        self.childless = False
        self.reaped_cpu_seconds = 0.0
        self.reaped_system_seconds = 0.0
        self.reaped_peak_bytes = 0
        self.cpu_seconds = 0.0
        self.system_seconds = 0.0
        self.memory_peak_bytes = 0
        self.poll = select.poll()
        self.notifier: socket.socket | None = None
        self.wakeup = self._catch_signals()
        self.outer = OuterProcess(spec.get("outer"))
        if self.outer.descriptor != NONE:
            self.poll.register(self.outer.descriptor, select.POLLIN)

    def _limits(self) -> list[DisconnectLimit | TimeLimit]:
        limits: list[DisconnectLimit | TimeLimit] = []
        leash, limit_seconds = self.spec.get("leash"), self.spec.get("time_limit_seconds")
        if isinstance(leash, dict):
            allowed, heard = as_float(leash["allowed_seconds"]), as_float(leash["heard_seconds"])
            limits.append(DisconnectLimit(str(leash["path"]), allowed, heard))
        if limit_seconds is not None:
            limits.append(TimeLimit(as_float(limit_seconds), as_float(self.spec["grace_seconds"])))
        return limits

    def _task(self, task: object) -> TaskProcess:
        assert isinstance(task, dict)
        group = self.group.child(f"task-{task['rank']}") if self.group else None
        output = OutputFile(f"output-{task['rank']}.log", as_int(self.spec["output_bytes_max"]))
        return _kind_of(task)(task, group, output)

    def _catch_signals(self) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for caught in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(caught, lambda *_: None)  # the wake-up pipe reports it
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(ignored, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the agent had blocked SIGTERM until now
        self.poll.register(reader, select.POLLIN)
        return reader

    # State and reports.

    def publish(self) -> None:
        """Save the state, then send it to the agent. The loop retries failures."""
        state = self.describe()
        try:
            self.state_file.write(state, last=self.end_time > 0)
            self.save_at = None
        except FileNotFoundError:
            self.save_at = None  # the whole directory was removed: nothing will read it
        except OSError:
            self.save_at = time.monotonic() + SAVE_RETRY_SECONDS
        self.notify(state)

    def notify(self, state: dict[str, object]) -> None:
        """Send the state to the agent; if no agent runs, the next one reads the file."""
        self.notify_at = None
        self.notifier = self.notifier or socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self.notifier.sendto(dumps(state).encode(), str(self.spec["notify"]))
        except BlockingIOError:
            self.notify_at = time.monotonic() + NOTIFY_RETRY_SECONDS
        except OSError:
            return

    def describe(self) -> dict[str, object]:
        """Return the complete state as in the state file. Times are seconds since 1970."""
        return {
            "job_id": self.spec["job_id"],
            "number": self.spec["number"],
            "epoch": self.spec["epoch"],
            "pid": os.getpid(),
            "pid_start_ticks": self.pid_start_ticks,
            "state": self.phase,
            "time": time.time(),
            "start_time": self.start_time,
            "end_time": self.end_time,
            "message": self.message,
            "stop_reason": self.stop_reason,
            "launch_cause": self.launch_cause,
            "exit": self._describe_exit(),
            "cpu_seconds": self.cpu_seconds,
            "system_seconds": self.system_seconds,
            "memory_peak_bytes": self.memory_peak_bytes,
            "dropped_bytes": sum(task.output.dropped_bytes for task in self.tasks),
            "tasks": [{"rank": task.rank, "pid": task.pid, "status": task.status} for task in self.tasks],
        }

    def _describe_exit(self) -> dict[str, object] | None:
        task = self.decider
        if task is None or task.status is None:
            return None
        return {
            "rank": task.rank,
            "code": max(0, os.waitstatus_to_exitcode(task.status)),
            "signal": os.WTERMSIG(task.status) if os.WIFSIGNALED(task.status) else 0,
            "out_of_memory": self.decider_out_of_memory,
        }

    # The life cycle of the attempt.

    def run(self) -> None:
        """Start all tasks and run until all of their processes are gone and the end is recorded."""
        self._leave_agent_group()
        adopt_orphans()
        for task in self.tasks:
            try:
                mark_executing()
                task.start()
            except OSError as error:
                self.fail(task, f"rank {task.rank} could not be started: {error.strerror}", cause_of(error, "process"))
                if task.exec_reader >= 0:
                    task.read_exec_result()
                break
            self.poll.register(task.exec_reader, select.POLLIN)
            self.poll.register(task.output_reader, select.POLLIN)
        self.publish()
        while not (self.all_processes_gone() and not self._pending_execs()):
            self.step()
        self.finish()
        while self.save_at is not None:
            self.step()

    def _leave_agent_group(self) -> None:
        """Move out of the agent's group, whose processes may be killed."""
        home = self.spec.get("home")
        try:
            if isinstance(home, dict):
                Group.from_json(home).attach()
        except GroupError as error:  # the job can run anyway
            print(error, file=sys.stderr, flush=True)

    def step(self) -> None:
        """Wait for an event and handle it."""
        ready = {descriptor for descriptor, _ in self.poll.poll(self._timeout_milliseconds())}
        if self.wakeup in ready:
            self._handle_signals()
        if self.outer.gone or self.outer.descriptor in ready:
            self._outer_job_ended()
        for task in self.tasks:
            if task.exec_reader in ready:
                self._read_exec_result(task)
            if task.output_reader in ready:
                descriptor = task.output_reader
                if not task.pump():
                    self.poll.unregister(descriptor)
        self.reap()
        self.run_due_actions()

    def _handle_signals(self) -> None:
        try:
            caught = os.read(self.wakeup, 4096)
        except BlockingIOError:
            return
        if signal.SIGTERM in caught:
            self.handle_stop_order()
        if signal.SIGUSR1 in caught:
            self._change_time_limit()

    def _change_time_limit(self) -> None:
        """Replace the time limit by the one that the agent has left in the directory."""
        if (changed := read_changed()) is None:
            return
        self.limits = [limit for limit in self.limits if not isinstance(limit, TimeLimit)]
        if changed[0] is not None:
            self.limits.append(TimeLimit(changed[0], as_float(self.spec["grace_seconds"]), self.started_boot_seconds))
        self.check_at = time.monotonic() if self.limits else None

    def _outer_job_ended(self) -> None:
        """Kill everything: nothing may outlive the outer job."""
        self.outer.gone = False
        if self.outer.descriptor != NONE:
            self.poll.unregister(self.outer.descriptor)
            self.outer.close()
        if not self.end_time and any(task.running for task in self.tasks):
            self._stop(0.0, REASON, self.outer.message)

    def _timeout_milliseconds(self) -> int | None:
        moments = [
            moment for moment in (self.kill_at, self.notify_at, self.save_at, self.check_at) if moment is not None
        ]
        return max(0, int(min(WAIT_SECONDS_MAX, min(moments) - time.monotonic()) * 1000) + 1) if moments else None

    def _pending_execs(self) -> bool:
        return any(task.exec_reader >= 0 for task in self.tasks)

    def _read_exec_result(self, task: TaskProcess) -> None:
        descriptor = task.exec_reader
        if not task.read_exec_result():
            return
        self.poll.unregister(descriptor)
        if not task.exec_error and not self._pending_execs():
            self.start_time = time.time()
        if task.exec_error:
            self.fail(task, f"rank {task.rank}: {task.exec_error}", task.launch_cause)
        elif self.kill_at is not None:
            task.signal_group(as_int(self.spec["warning_signal"]))  # the other tasks were already warned
        elif self.phase == "STARTING" and not self._pending_execs():
            self.phase = "RUNNING"
            self.publish()

    def reap(self) -> None:
        """Reap ended tasks and adopted orphans."""
        while True:
            try:
                pid, status, usage = os.wait3(os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                break
            if pid == 0:
                self.childless = False
                break
            self.reaped_cpu_seconds += usage.ru_utime + usage.ru_stime
            self.reaped_system_seconds += usage.ru_stime
            self.reaped_peak_bytes = max(self.reaped_peak_bytes, usage.ru_maxrss * 1024)
            for task in self.tasks:
                if task.owns(pid):
                    self._task_ended(task, status)
        if not self.end_time and not any(self._must_wait_for(task) for task in self.tasks):
            now = time.monotonic()
            self.kill_at = now if self.kill_at is None else min(self.kill_at, now)

    def _must_wait_for(self, task: TaskProcess) -> bool:
        """Return whether a task still runs; during the grace period, also whether a warned process of it does."""
        return task.running or (self.stop_asked and task.group_lives())

    def _task_ended(self, task: TaskProcess, status: int) -> None:
        if self.outer.nested and not self.stop_asked and not self.failed:
            self._look_for_signal()
        task.status = status
        if task.exec_reader >= 0:
            self._read_exec_result(task)
        if task.failed and not task.exec_error:
            self.fail(task, exit_message(task, self._out_of_memory(task)))

    def _look_for_signal(self) -> None:
        """Handle a SIGTERM that the other system sent to all processes, if it ended a task first."""
        look = select.poll()
        look.register(self.wakeup, select.POLLIN)
        deadline = time.monotonic() + SETTLE_MILLISECONDS / 1000
        while not self.stop_asked and (left := deadline - time.monotonic()) > 0:
            if look.poll(int(left * 1000) + 1):
                self._handle_signals()

    def _out_of_memory(self, task: TaskProcess) -> bool:
        return task.group is not None and task.group.oom_kills() > 0

    def fail(self, task: TaskProcess, reason: str, launch_cause: str = "") -> None:
        """Record the failure of the gang and stop the other tasks. A requested stop is not a failure.

        With a `launch_cause` the node failed before the program was executed, not the job.
        """
        if self.decider is None:
            self.decider = task
            self.decider_out_of_memory = self._out_of_memory(task)
        if not self.stop_asked and not self.failed:
            self.failed, self.message, self.launch_cause = True, reason, launch_cause
            self.warn_then_kill(as_float(self.spec["grace_seconds"]))

    def handle_stop_order(self) -> None:
        """Warn the tasks and set the deadline for the kill; a later order can only shorten it."""
        if self.end_time:
            self.save_at = None  # the agent knows the end: it need not be saved
            return
        if not self.stop_asked and not any(task.running for task in self.tasks):
            return  # it ended by itself
        grace_seconds, reason = read_stop_order() or (None, "")
        message = ""
        if grace_seconds is None and not self.stop_asked:
            grace_seconds = as_float(self.spec["grace_seconds"])
            if self.outer.nested:
                reason, message = REASON, self.outer.message
            else:
                self.failed, message = True, STOPPED_EXTERNALLY
        self._stop(grace_seconds, reason, message)

    def _stop(self, grace_seconds: float | None, reason: str, message: str = "") -> None:
        """Begin to stop the tasks; without a grace period, what has begun goes on."""
        self.message = message or self.message
        self.stop_asked, self.stop_reason = True, self.stop_reason or reason
        if grace_seconds is not None:
            self.warn_then_kill(grace_seconds)
        if self.phase != "STOPPING":
            self.phase = "STOPPING"
            self.publish()

    def warn_then_kill(self, grace_seconds: float) -> None:
        """Send the warning signal once, and kill when the grace period is over."""
        moment = time.monotonic() + max(0.0, grace_seconds)
        self._thaw()
        if self.kill_at is None:
            for task in self.tasks:
                task.signal_group(as_int(self.spec["warning_signal"]))
        self.kill_at = moment if self.kill_at is None else min(self.kill_at, moment)

    def _thaw(self) -> None:
        """Thaw a frozen group so that it can handle its warning."""
        try:
            if self.group is not None and self.group.is_frozen():
                self.group.freeze(False)
        except GroupError as error:  # then it is killed without a warning
            print(error, file=sys.stderr, flush=True)

    def run_due_actions(self) -> None:
        """Run what is due: the next round of kills, or a failed datagram or save again."""
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            if not self.all_processes_gone():
                self.kill_round()
            self.kill_rounds += 1
            self.kill_at = now + min(1.0, KILL_ROUND_SECONDS * self.kill_rounds)
        if self.check_at is not None and now >= self.check_at:
            self.check_at = self.check_limits()
        if self.save_at is not None and now >= self.save_at:
            self.publish()
        elif self.notify_at is not None and now >= self.notify_at:
            self.notify(self.describe())

    def check_limits(self) -> float | None:
        """Stop a job of which a limit has expired; return the time of the next check."""
        if self.end_time or self.stop_asked or self.failed:
            return None
        expired = next((limit for limit in self.limits if limit.expired()), None)
        if expired is None:
            return time.monotonic() + min(limit.next_check_seconds() for limit in self.limits)
        if not any(task.running for task in self.tasks):
            return None  # it ended by itself
        self._stop(as_float(self.spec["grace_seconds"]), expired.reason, expired.message)
        return None

    def kill_round(self) -> None:
        """Kill all processes once; processes forked in the meantime are killed in the next round."""
        if self.group is not None and self.group.exists():
            try:
                self.group.kill()
            except GroupError as error:  # it is being removed: its processes are killed as our descendants
                print(error, file=sys.stderr, flush=True)
        for pid in children(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # gone, or a set-uid program, which the group kills

    def all_processes_gone(self) -> bool:
        """Return whether no child, own or adopted, and no process in the group is left."""
        self.reap()
        try:
            return self.childless and (self.group is None or not self.group.pids())
        except GroupError as error:  # unknown; looked at again
            print(error, file=sys.stderr, flush=True)
            return False

    def finish(self) -> None:
        """Record usage, remove the groups, and record the end."""
        for task in self.tasks:
            if task.output_reader >= 0:
                self.poll.unregister(task.output_reader)
            task.drain()
        self.cpu_seconds, self.memory_peak_bytes = self.reaped_cpu_seconds, self.reaped_peak_bytes
        self.system_seconds = self.reaped_system_seconds
        if self.group is not None:
            self.cpu_seconds = self.group.cpu_seconds() or self.cpu_seconds
            self.system_seconds = self.group.system_seconds() or self.system_seconds
            self.memory_peak_bytes = self.group.memory_peak_bytes() or self.memory_peak_bytes
            self.group.remove()
        self.end_time = time.time()
        self.kill_at = None
        if self.decider is None and self.tasks:
            self.decider = self.tasks[0]
        failed = NOT_LAUNCHED if self.launch_cause else "FAILED"
        self.phase = failed if self.failed else "STOPPED" if self.stop_asked else "SUCCEEDED"
        self._note_dropped_output()
        self.publish()

    def _note_dropped_output(self) -> None:
        dropping = [task.output for task in self.tasks if task.output.dropped_bytes]
        if dropping:
            count = sum(output.dropped_bytes for output in dropping)
            note = f"{count} bytes of output were dropped: {dropping[0].drop_reason}"
            self.message = f"{self.message}; {note}" if self.message else note


def _kind_of(task: dict[str, Any]) -> type[TaskProcess]:
    """Return the class of a task; what runs containers is imported only for jobs that have one."""
    if not task.get("container"):
        return TaskProcess
    if TYPE_CHECKING:
        from cotenant.node_agent.supervisor.container import ContainerTask
        from cotenant.node_agent.supervisor.rootless import RootlessTask
    elif task["container"]["runtime"]:
        from container import ContainerTask
    else:
        from rootless import RootlessTask
    return ContainerTask if task["container"]["runtime"] else RootlessTask
