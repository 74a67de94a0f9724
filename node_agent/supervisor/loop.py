"""One attempt's state and the loop that drives it: see `supervisor.py`, which starts it, for the theory.

Loaded by the supervisor without the package around it. The job waits for what is imported here: next to nothing.
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

    from cotenant.node_agent.supervisor.cgroups import Group, GroupError
    from cotenant.node_agent.supervisor.launch_faults import NOT_LAUNCHED, cause_of, mark_executing
    from cotenant.node_agent.supervisor.lease import Leash
    from cotenant.node_agent.supervisor.output_file import OutputFile
    from cotenant.node_agent.supervisor.plain_json import dumps
    from cotenant.node_agent.supervisor.process_table import children, start_ticks
    from cotenant.node_agent.supervisor.state_file import StateFile
    from cotenant.node_agent.supervisor.stop_order import BY_ANOTHER, ordered_grace_seconds
    from cotenant.node_agent.supervisor.task_process import (
        TaskProcess,
        adopt_orphans,
        float_of,
        how_it_ended,
        number,
        sequence,
    )
else:
    import _signal as signal  # the modules around these two make enumerations, which take longer than all our own
    import _socket as socket

    from cgroups import Group, GroupError
    from launch_faults import NOT_LAUNCHED, cause_of, mark_executing
    from lease import Leash
    from output_file import OutputFile
    from plain_json import dumps
    from process_table import children, start_ticks
    from state_file import StateFile
    from stop_order import BY_ANOTHER, ordered_grace_seconds
    from task_process import TaskProcess, adopt_orphans, float_of, how_it_ended, number, sequence

KILL_ROUND_SECONDS = 0.02
NOTIFY_RETRY_SECONDS = 0.05
SAVE_RETRY_SECONDS = 1.0
WAIT_SECONDS_MAX = 86_400.0  # poll takes no more than 24 days
STATE_BYTES_PER_TASK = 256


class Supervisor:
    """The attempt's state and the loop that drives it."""

    def __init__(self, spec: dict[str, object]) -> None:
        self.spec = spec
        group = spec["group"]
        self.group = Group.from_json(group) if isinstance(group, dict) else None
        self.tasks = [self._task(task) for task in sequence(spec["tasks"])]
        self.state_file = StateFile("state.json", 2048 + STATE_BYTES_PER_TASK * len(self.tasks))
        self.phase = "STARTING"
        self.message = ""
        self.decider: TaskProcess | None = None
        self.decider_out_of_memory = False
        self.failed = False
        self.launch_cause = ""  # where it failed before the user's program was executed
        self.stop_asked = False
        self.stop_reason = ""  # why it stops without an order
        self.pid_start_ticks = start_ticks(os.getpid())
        self.start_time = self.end_time = 0.0
        self.kill_rounds = 0
        self.kill_at: float | None = None  # on the monotonic clock, as are the other times to act
        self.notify_at: float | None = None
        self.save_at: float | None = None
        self.leash = self._leash()
        self.look_at = time.monotonic() if self.leash else None
        self.childless = False
        self.reaped_cpu_seconds = 0.0
        self.reaped_peak_bytes = 0
        self.cpu_seconds = 0.0
        self.memory_peak_bytes = 0
        self.poll = select.poll()
        self.notifier: socket.socket | None = None
        self.wakeup = self._catch_signals()

    def _leash(self) -> Leash | None:
        leash = self.spec.get("leash")
        if not isinstance(leash, dict):
            return None
        return Leash(str(leash["path"]), float_of(leash["allowed_seconds"]), float_of(leash["heard_seconds"]))

    def _task(self, task: object) -> TaskProcess:
        assert isinstance(task, dict)
        group = self.group.child(f"task-{task['rank']}") if self.group else None
        output = OutputFile(f"output-{task['rank']}.log", number(self.spec["output_bytes_max"]))
        return TaskProcess(task, group, output)

    def _catch_signals(self) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for caught in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(caught, lambda *_: None)  # the wake-up pipe is what tells
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(ignored, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the agent blocked SIGTERM until it could be heard
        self.poll.register(reader, select.POLLIN)
        return reader

    # What is known, and telling it.

    def publish(self) -> None:
        """Save the state, then tell the agent. What fails is tried again from the loop."""
        state = self.describe()
        try:
            self.state_file.write(state, last=self.end_time > 0)
            self.save_at = None
        except FileNotFoundError:
            self.save_at = None  # the whole directory was removed: nobody is going to read it
        except OSError:
            self.save_at = time.monotonic() + SAVE_RETRY_SECONDS
        self.notify(state)

    def notify(self, state: dict[str, object]) -> None:
        """Send the state to the agent, which may be away: then the next one reads the file."""
        self.notify_at = None
        self.notifier = self.notifier or socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self.notifier.sendto(dumps(state).encode(), str(self.spec["notify"]))
        except BlockingIOError:
            self.notify_at = time.monotonic() + NOTIFY_RETRY_SECONDS
        except OSError:
            return

    def describe(self) -> dict[str, object]:
        """All that is known, as the state file has it. Times are seconds since 1970."""
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

    # The life of the attempt.

    def run(self) -> None:
        """Start all tasks and stay until all that came of them is gone and recorded."""
        self._step_into_home()
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
        while not (self.everything_is_dead() and not self._pending_execs()):
            self.step()
        self.finish()
        while self.save_at is not None:
            self.step()

    def _step_into_home(self) -> None:
        """Leave the agent's group, which may be ended without us."""
        home = self.spec.get("home")
        try:
            if isinstance(home, dict):
                Group.from_json(home).attach()
        except GroupError as error:  # the job can run all the same
            print(error, file=sys.stderr, flush=True)

    def step(self) -> None:
        """Wait for something to happen and deal with it."""
        ready = {descriptor for descriptor, _ in self.poll.poll(self._timeout_milliseconds())}
        if self.wakeup in ready:
            caught = os.read(self.wakeup, 4096)
            if signal.SIGTERM in caught:
                self.obey_stop_order()
        for task in self.tasks:
            if task.exec_reader in ready:
                self._learn_exec_result(task)
            if task.output_reader in ready:
                descriptor = task.output_reader
                if not task.pump():
                    self.poll.unregister(descriptor)
        self.reap()
        self.act_on_time()

    def _timeout_milliseconds(self) -> int | None:
        moments = [
            moment for moment in (self.kill_at, self.notify_at, self.save_at, self.look_at) if moment is not None
        ]
        return max(0, int(min(WAIT_SECONDS_MAX, min(moments) - time.monotonic()) * 1000) + 1) if moments else None

    def _pending_execs(self) -> bool:
        return any(task.exec_reader >= 0 for task in self.tasks)

    def _learn_exec_result(self, task: TaskProcess) -> None:
        descriptor = task.exec_reader
        if not task.read_exec_result():
            return
        self.poll.unregister(descriptor)
        if not task.exec_error and not self._pending_execs():
            self.start_time = time.time()
        if task.exec_error:
            self.fail(task, f"rank {task.rank}: {task.exec_error}", task.launch_cause)
        elif self.kill_at is not None:
            task.signal_group(number(self.spec["warning_signal"]))  # the others have had theirs
        elif self.phase == "STARTING" and not self._pending_execs():
            self.phase = "RUNNING"
            self.publish()

    def reap(self) -> None:
        """Collect what has ended: tasks, and orphans that the kernel gave to us."""
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
            self.reaped_peak_bytes = max(self.reaped_peak_bytes, usage.ru_maxrss * 1024)
            for task in self.tasks:
                if task.pid == pid and task.status is None:
                    self._task_ended(task, status)
        if not self.end_time and not any(self._is_waited_for(task) for task in self.tasks):
            now = time.monotonic()
            self.kill_at = now if self.kill_at is None else min(self.kill_at, now)

    def _is_waited_for(self, task: TaskProcess) -> bool:
        """Whether a task still runs; in a grace also whether something does that has heard its warning."""
        return task.running or (self.stop_asked and task.group_lives())

    def _task_ended(self, task: TaskProcess, status: int) -> None:
        task.status = status
        if task.exec_reader >= 0:
            self._learn_exec_result(task)
        if task.failed and not task.exec_error:
            self.fail(task, how_it_ended(task, self._out_of_memory(task)))

    def _out_of_memory(self, task: TaskProcess) -> bool:
        return task.group is not None and task.group.oom_kills() > 0

    def fail(self, task: TaskProcess, reason: str, launch_cause: str = "") -> None:
        """Note what broke the gang, and stop the rest. An end that was asked for is no failure.

        With a `launch_cause` the node failed before the program was executed, and not the job.
        """
        if self.decider is None:
            self.decider = task
            self.decider_out_of_memory = self._out_of_memory(task)
        if not self.stop_asked and not self.failed:
            self.failed, self.message, self.launch_cause = True, reason, launch_cause
            self.warn_then_kill(float_of(self.spec["grace_seconds"]))

    def obey_stop_order(self) -> None:
        """Warn the tasks and set the time to kill; told again, never later than first said."""
        if self.end_time:
            self.save_at = None  # the agent knows the end: it need not be on the disk any more
            return
        if not self.stop_asked and not any(task.running for task in self.tasks):
            return  # it has ended by itself
        grace_seconds = ordered_grace_seconds()
        if grace_seconds is None and not self.stop_asked:
            self.failed, self.message = True, BY_ANOTHER
            grace_seconds = float_of(self.spec["grace_seconds"])
        self.stop_asked = True
        if grace_seconds is not None:
            self.warn_then_kill(grace_seconds)
        if self.phase != "STOPPING":
            self.phase = "STOPPING"
            self.publish()

    def warn_then_kill(self, grace_seconds: float) -> None:
        """Send the warning signal once, and kill when grace is over."""
        moment = time.monotonic() + max(0.0, grace_seconds)
        self._let_go_on()
        if self.kill_at is None:
            for task in self.tasks:
                task.signal_group(number(self.spec["warning_signal"]))
        self.kill_at = moment if self.kill_at is None else min(self.kill_at, moment)

    def _let_go_on(self) -> None:
        """Thaw what was suspended: it is to hear its warning."""
        try:
            if self.group is not None and self.group.is_frozen():
                self.group.freeze(False)
        except GroupError as error:  # then it is killed without having heard
            print(error, file=sys.stderr, flush=True)

    def act_on_time(self) -> None:
        """Do what is due: the next round of killing, a datagram or a save that failed before."""
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_round()
            self.kill_rounds += 1
            self.kill_at = now + min(1.0, KILL_ROUND_SECONDS * self.kill_rounds)
        if self.look_at is not None and now >= self.look_at:
            self.look_at = self.look_after_placement()
        if self.save_at is not None and now >= self.save_at:
            self.publish()
        elif self.notify_at is not None and now >= self.notify_at:
            self.notify(self.describe())

    def look_after_placement(self) -> float | None:
        """Stop a job that is not to run on without the control plane; returns when to look again."""
        assert self.leash is not None
        if self.end_time or self.stop_asked or self.failed:
            return None
        if not self.leash.over():
            return time.monotonic() + self.leash.look_again_seconds()
        if not any(task.running for task in self.tasks):
            return None  # it has ended by itself
        allowed_seconds = self.spec["leash"]["allowed_seconds"]  # type: ignore[index]  # it is what the leash is of
        self.stop_asked, self.stop_reason = True, "DISCONNECTED"
        self.message = f"its node had been without the control plane for {allowed_seconds:g} s"
        self.warn_then_kill(float_of(self.spec["grace_seconds"]))
        self.phase = "STOPPING"
        self.publish()
        return None

    def kill_round(self) -> None:
        """Kill everything there is once; what is forked meanwhile falls to the next round."""
        if self.group is not None and self.group.exists():
            try:
                self.group.kill()
            except GroupError as error:  # somebody else is removing it: what is in it is killed as our descendants
                print(error, file=sys.stderr, flush=True)
        for pid in children(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # gone, or a set-uid program: the group gets that one

    def everything_is_dead(self) -> bool:
        """Whether no child is left, own or adopted, and no process in the group."""
        self.reap()
        return self.childless and (self.group is None or not self.group.pids())

    def finish(self) -> None:
        """Take the account, remove the groups, and record the end."""
        for task in self.tasks:
            if task.output_reader >= 0:
                self.poll.unregister(task.output_reader)
            task.drain()
        self.cpu_seconds, self.memory_peak_bytes = self.reaped_cpu_seconds, self.reaped_peak_bytes
        if self.group is not None:
            self.cpu_seconds = self.group.cpu_seconds() or self.cpu_seconds
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
