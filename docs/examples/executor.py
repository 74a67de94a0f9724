"""An executor: it runs the attempts of one node as subprocesses, and needs only grpcio and the stubs of the protos.

COTENANT_ENDPOINT and COTENANT_TOKEN say which placement to connect to; the arguments are the node's id and the file in
which it remembers what it must not forget when it is killed.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import grpc

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc as agent_grpc
from cotenant.v1 import job_pb2, node_capabilities_pb2, resources_pb2

RUNNING, SUCCEEDED = job_pb2.ATTEMPT_STATE_RUNNING, job_pb2.ATTEMPT_STATE_SUCCEEDED
FAILED, STOPPED = job_pb2.ATTEMPT_STATE_FAILED, job_pb2.ATTEMPT_STATE_STOPPED
NOT_LAUNCHED, RECONNECT_SECONDS = job_pb2.ATTEMPT_STATE_NOT_LAUNCHED, 0.5


class Executor:
    """One node. Its reports are kept until placement acknowledges them."""

    def __init__(self, node_id, memory):
        self.node_id, self.memory, self.incarnation = node_id, memory, uuid.uuid4().hex
        self.lock = threading.RLock()
        self.known = {"term": 0, "epochs": {}, "groups": {}}  # groups: of processes, by attempt; 0 once it has ended
        if memory.exists():
            self.known = json.loads(memory.read_text())
        for attempt, group in self.known["groups"].items():  # of an earlier life: they are declared lost
            kill(group, signal.SIGKILL)
            self.known["groups"][attempt] = 0
        self.reports, self.stopping, self.outgoing = {}, {}, queue.Queue()
        self.beat_seconds, self.heard_seconds = 1.0, 0.0  # heard: when the last acknowledged heartbeat was sent

    def remember(self):
        """Write what must survive this process, before anything is done that depends on it."""
        partial = self.memory.with_suffix(".new")
        partial.write_text(json.dumps(self.known))
        partial.replace(self.memory)

    def run(self):
        """Stay connected; attempts run on between two streams."""
        credentials = [("authorization", f"Bearer {os.environ['COTENANT_TOKEN']}")]
        while True:
            with grpc.insecure_channel(os.environ["COTENANT_ENDPOINT"]) as channel:
                try:
                    stream = agent_grpc.AgentServiceStub(channel).Connect(self.requests(), metadata=credentials)
                    for response in stream:
                        if not self.obey(response):
                            stream.cancel()
                            break
                except grpc.RpcError as error:
                    print(f"disconnected: {error.code().name}: {error.details()}", file=sys.stderr)
            time.sleep(RECONNECT_SECONDS)

    def requests(self):
        """Yield the hello with all attempts, then reports as they come, and heartbeats."""
        with self.lock:
            self.outgoing = outgoing = queue.Queue()
            hello = agent_pb2.Hello(node_id=self.node_id, incarnation=self.incarnation, inventory=inventory())
            hello.capabilities.cores = node_capabilities_pb2.CORE_CONTROL_NONE
            hello.capabilities.able.append(node_capabilities_pb2.CAPABILITY_SIGNALS)
            hello.attempts.extend(self.reports.values())
        yield agent_pb2.ConnectRequest(hello=hello)
        while outgoing is self.outgoing:
            try:
                yield agent_pb2.ConnectRequest(reports=[outgoing.get(timeout=self.beat_seconds)])
            except queue.Empty:
                yield agent_pb2.ConnectRequest(beat=time.monotonic_ns())

    def obey(self, response):
        """Carry out what placement orders; False if it must not be obeyed."""
        with self.lock:
            if response.HasField("welcome"):
                if response.welcome.term < self.known["term"]:
                    return False  # a deposed leader
                self.known["term"] = response.welcome.term
                self.beat_seconds = response.welcome.heartbeat_interval.ToMilliseconds() / 1000 or 1.0
                self.remember()
            if response.heard:
                self.heard_seconds = response.heard / 1e9
            for order in response.assignments:
                self.assign(order, f"{order.job_id}/{order.number}")
            for order in response.stops:
                self.stop(order, f"{order.job_id}/{order.number}")
            for ack in response.acks:
                self.reports.pop(f"{ack.job_id}/{ack.number}", None)
        return True

    def assign(self, order, attempt):
        """Start an attempt once, whatever is repeated, and never by an order older than another for its job."""
        if order.epoch < self.known["epochs"].get(order.job_id, 0):
            if attempt not in self.reports:
                self.report(order, NOT_LAUNCHED, message="refused: its epoch is older than one seen before")
        elif attempt in self.reports:
            self.outgoing.put(self.reports[attempt])
        elif attempt in self.known["groups"]:
            self.report(order, FAILED, message="it already ran here")
        else:
            self.known["epochs"][order.job_id] = order.epoch
            self.known["groups"][attempt] = 0
            self.remember()
            self.launch(order, attempt)

    def launch(self, order, attempt):
        """Start the process of each replica here, all in one process group."""
        processes = []
        try:
            for task in order.allocation.tasks:
                group = processes[0].pid if processes else 0
                where, variables = order.spec.working_directory or None, environment(order, task)
                command = list(order.spec.command)
                processes.append(subprocess.Popen(command, cwd=where, env=variables, process_group=group))
        except OSError as error:
            kill(processes[0].pid if processes else 0, signal.SIGKILL)
            self.report(order, FAILED, 127, message=str(error))
            return
        self.known["groups"][attempt] = processes[0].pid
        self.remember()
        self.report(order, RUNNING)
        threading.Thread(target=self.wait, args=(order, attempt, processes), daemon=True).start()
        if order.spec.HasField("stop_after_disconnected"):
            threading.Thread(target=self.watch_contact, args=(order, attempt), daemon=True).start()
        if order.spec.HasField("time_limit"):
            limit = order.spec.time_limit.ToMilliseconds() / 1000
            self.later(limit, lambda: self.end(attempt, job_pb2.STOP_REASON_TIME_LIMIT, 0.0))

    def watch_contact(self, order, attempt):
        """Stop an attempt that may not run for longer than this without placement."""
        limit = order.spec.stop_after_disconnected.ToMilliseconds() / 1000
        self.beat_seconds = min(self.beat_seconds, limit / 4)
        while self.reports[attempt].state == RUNNING and attempt not in self.stopping:
            time.sleep(limit / 10)
            if time.monotonic() - self.heard_seconds > limit:
                self.end(attempt, job_pb2.STOP_REASON_DISCONNECTED, order.spec.grace.ToMilliseconds() / 1000)

    def wait(self, order, attempt, processes):
        """Report the end of an attempt: the first process that fails ends the others."""
        codes = []
        for process in processes:
            codes.append(process.wait())
            if codes[-1]:
                kill(processes[0].pid, signal.SIGKILL)
        code = next((code for code in codes if code), 0)
        with self.lock:
            self.known["groups"][attempt] = 0
            self.remember()
            if attempt in self.stopping:
                self.report(order, STOPPED, code, stop_reason=self.stopping[attempt])
            else:
                self.report(order, FAILED if code else SUCCEEDED, code)

    def stop(self, order, attempt):
        """Warn the processes of an attempt, and kill them after the grace; report what is not here as stopped."""
        report, epochs = self.reports.get(attempt), self.known["epochs"]
        epochs[order.job_id] = max(order.epoch, epochs.get(order.job_id, 0))
        if report is None:
            self.report(order, STOPPED, message="unknown on this node")
        elif report.state == RUNNING and order.epoch >= report.epoch:
            self.end(attempt, order.reason, order.grace.ToMilliseconds() / 1000)
        else:
            self.outgoing.put(report)

    def end(self, attempt, reason, grace):
        """Stop an attempt that runs; the first reason counts."""
        group = self.known["groups"].get(attempt, 0)
        self.stopping.setdefault(attempt, reason)
        kill(group, signal.SIGTERM)
        self.later(grace, lambda: kill(group if self.known["groups"].get(attempt) == group else 0, signal.SIGKILL))

    def later(self, seconds, action):
        """Do something after a time."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    def report(self, order, state, code=0, **fields):
        """Keep and send the state of an attempt."""
        attempt = f"{order.job_id}/{order.number}"
        epoch = max(order.epoch, self.known["epochs"].get(order.job_id, 0))
        report = agent_pb2.AttemptReport(job_id=order.job_id, number=order.number, epoch=epoch, state=state, **fields)
        report.time.GetCurrentTime()
        if state == RUNNING:
            report.start_time.CopyFrom(report.time)
        elif attempt in self.reports and self.reports[attempt].HasField("start_time"):
            report.start_time.CopyFrom(self.reports[attempt].start_time)
        if state in (SUCCEEDED, FAILED, STOPPED):
            report.exit.code, report.exit.signal = max(code, 0), max(-code, 0)
        self.reports[attempt] = report
        self.outgoing.put(report)


def inventory():
    """Return what jobs may use: the cores of this machine. GPUs would be listed by their UUIDs."""
    cores = [resources_pb2.Core(id=cpu, cpus=[cpu]) for cpu in sorted(os.sched_getaffinity(0))]
    return resources_pb2.Inventory(cores=cores, memory_bytes=2**30, address="127.0.0.1")


def environment(order, task):
    """Return the variables of a replica."""
    gang = {"RANK": task.rank, "WORLD_SIZE": order.world_size, "MASTER_PORT": order.master_port}
    named = {"COTENANT_JOB_ID": order.job_id, "COTENANT_ATTEMPT": order.number, "MASTER_ADDR": order.master_address}
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in task.gpus)}
    own = {name: str(value) for name, value in {**gang, **named, **gpus}.items()}
    return {"PATH": os.environ["PATH"], **order.spec.environment, **own}


def kill(group, number):
    """Send a signal to a process group; 0 is none."""
    try:
        if group:
            os.killpg(group, number)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    Executor(sys.argv[1], Path(sys.argv[2])).run()
