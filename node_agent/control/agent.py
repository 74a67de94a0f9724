"""The agent of one server: it keeps the streams to the control plane open and runs what placement assigns.

An agent may be stopped, killed or replaced at any time: jobs keep running, and the next agent re-attaches to them. It
never stops retrying an unreachable control plane and never acts without its orders.
"""

from __future__ import annotations

import asyncio
import os
import time as clock
import uuid
from collections.abc import Callable
from random import Random

import structlog

from cotenant import plugins
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.history.events import Came, Over
from cotenant.history.recording import record
from cotenant.name_resolution import NAMES
from cotenant.node_agent.control.agent_config import AgentConfig
from cotenant.node_agent.control.attempt_manager import AttemptManager
from cotenant.node_agent.control.contention_link import ContentionLink
from cotenant.node_agent.control.disk_watch import DiskWatch, Evictions
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.node_agent.control.live_profiling import LiveProfiler
from cotenant.node_agent.control.machine_claims import claim_machine
from cotenant.node_agent.control.node_health import NodeHealth
from cotenant.node_agent.control.output_upload import OutputUploads
from cotenant.node_agent.control.placement_link import PlacementLink
from cotenant.node_agent.control.progress import ProgressTracker
from cotenant.node_agent.control.progress_reader import ProgressReader
from cotenant.node_agent.control.sampler import Sampler, SampleSources
from cotenant.node_agent.control.state_directory import open_state_directory
from cotenant.node_agent.control.throttle_directives import ThrottleDirectives
from cotenant.node_agent.probes.gpus import AUTO
from cotenant.node_agent.probes.hot_plug import HotPlug
from cotenant.node_agent.probes.inventory import SYSFS, ProbeOptions, probe
from cotenant.node_agent.probes.memory_bandwidth import NodeBandwidth
from cotenant.node_agent.probes.nvml_link import NvmlLink
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status, timestamp
from cotenant.node_agent.runtime.runtime_port import HotPlugRuntime, Runtime, RuntimeContext
from cotenant.node_agent.runtime.socket_paths import remove_socket_directory, socket_directory
from cotenant.node_agent.supervisor.lease import LEASE, Lease, boot_id
from cotenant.rpc import channel
from cotenant.rpc.loop_lag import LoopLagMonitor
from cotenant.rpc.store_marks import mark_from_wire, mark_to_wire
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.security.certificate_expiry import CertificateExpiry
from cotenant.v1 import job_pb2, resources_pb2

log = structlog.get_logger()

__all__ = ["Agent", "AgentConfig"]

SAMPLE_SECONDS_MIN = 0.05
MARK_SECONDS = 10.0  # between writes of the store's mark when nothing else is written


class Agent:
    """All parts of one node's agent, wired together. `run` may be called once."""

    def __init__(
        self, config: AgentConfig, runtime: Runtime | None = None, on_start: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._on_start = on_start
        self._incarnation = uuid.uuid4().hex
        self._background = BackgroundTasks()
        self._marked_seconds = 0.0  # when the store's mark was last written
        self._loop_lag = LoopLagMonitor()
        self._rng = Random(self._incarnation)  # for jitter, not for security

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; running jobs keep running.

        Raises:
            AgentAlreadyRunning: another agent uses the state directory or parts of the machine.
            NodeMismatch: the state directory belongs to another node.
        """
        state_dir = self._config.state_dir
        locks = [open_state_directory(state_dir, self._config.node_id)]
        log.info("agent_starting", node=self._config.node_id, incarnation=self._incarnation)
        try:
            inventory = await asyncio.to_thread(probe, self._probe_options(), sysfs=SYSFS)
            if not self._config.share_machine:
                locks += await asyncio.to_thread(claim_machine, self._config.node_id, state_dir, inventory)
            await self._serve(inventory, stop)
        finally:
            for lock in locks:
                os.close(lock)
        log.info("agent_stopped", node=self._config.node_id)

    def _probe_options(self) -> ProbeOptions:
        config = self._config
        return ProbeOptions(
            node_id=config.node_id,
            gpus=config.gpus,
            cpus=config.cpus,
            memory_bytes=config.memory_bytes,
            rack=config.rack,
            address=config.address or config.node_id,
            shareable_gpus=config.shareable_gpus,
            split_siblings=config.split_siblings,
            machine="" if config.share_machine else boot_id(),
            machine_parts=config.machine_parts,
        )

    async def _serve(self, inventory: resources_pb2.Inventory, stop: asyncio.Event) -> None:
        config = self._config
        runtime: Runtime = self._runtime or plugins.load("cotenant.runtimes", config.runtime)
        fence = EpochFence(config.state_dir / "fence.jsonl", config.node_id)
        progress = ProgressReader(socket_directory(config.state_dir), self._report_progress)
        profiles = LiveProfiler(runtime, progress, lambda report: self._link.report_profile(report))
        bandwidth = NodeBandwidth.open(config.memory_bandwidth_peak)
        throttling = self._throttling = ThrottleDirectives(
            runtime, profiles, lambda: self._orders.attempts, progress.report_soon,
            window_seconds=config.sample_interval_seconds, bandwidth_enforced=bandwidth.enforced,
        )  # fmt: skip
        orders = AttemptManager(
            config.node_id, runtime, fence, progress, profiles,
            lambda report: self._link.report(report), lambda report: self._link.report_resize(report),
            lambda: self._health, throttling.is_throttled,
        )  # fmt: skip
        self._fence, self._orders, self._inventory, self._ends = fence, orders, inventory, Evictions(runtime.stop)
        self._lease = Lease(str(config.state_dir / LEASE))
        health = self._health = self._watch(inventory)
        orders.signs_of = health.signs_of
        self._link = PlacementLink(
            config.placement_endpoint,
            config.token,
            hello=self._hello,
            welcome=self._welcome,
            apply_orders=self._apply_orders,
            acknowledged=self._acknowledged,
            min_disconnect_seconds=orders.min_disconnect_seconds,
            condition=self._condition,
            rng=self._rng,
        )
        self._uploads = OutputUploads(self._link.upload, runtime.output_directory, self._is_running)
        try:
            await health.open()
            for found in await runtime.open(self._context(inventory), self._changed):
                orders.recover(found)
                self._record_end(found.status)
            throttling.recover()
            inventory.not_enforced.extend(runtime.not_enforced())
            self._start_monitors()
            self._background.forever("cpus", self._follow_cpus(inventory, runtime).run)
            self._background.forever("disk_watch", self._watch_disk(runtime).run)
            self._background.forever("placement_link", self._link.run)
            if config.contention_endpoint:
                sight = SampleSources(
                    lambda: orders.attempts, progress.rate_over, profiles.in_progress,
                    lambda key: throttling.held(key).throttle, health.utilisation_percent,
                )  # fmt: skip
                self._background.forever("contention_link", self._contention(runtime, bandwidth, sight).run)
            self._on_start()
            await stop.wait()
        finally:
            await throttling.close()
            bandwidth.close()
            await profiles.close()
            await self._link.flush_outbox()
            for part in (self._background, self._uploads, orders, progress, runtime, health):
                await part.close()
            self._lease.close()
            if all(attempt.status.ended for attempt in orders.attempts.values()):
                remove_socket_directory(config.state_dir)

    def _start_monitors(self) -> None:
        """Start monitoring the node's health and the agent's certificate, event loop and name lookups."""
        self._background.forever("health", self._health.run)
        self._background.start(self._watch_certificate())
        self._background.forever("loop_lag", self._loop_lag.run)
        self._background.forever("name_checks", NAMES.run)

    async def _watch_certificate(self) -> None:
        if shown := channel.shown():
            await CertificateExpiry(shown).run()

    def _context(self, inventory: resources_pb2.Inventory) -> RuntimeContext:
        return RuntimeContext(
            node_id=self._config.node_id,
            state_dir=self._config.state_dir,
            inventory=inventory,
            output_bytes_max=self._config.output_bytes_max,
            kept_max=self._config.kept_max,
            kept_seconds_max=self._config.kept_seconds_max,
            pids_max=self._config.pids_max,
            gpu_minors=self._health.gpu_minors,
            users=self._config.users,
            shared_identity=self._config.shared_identity,
            hidden=self._config.hidden,
        )

    def _watch(self, inventory: resources_pb2.Inventory) -> NodeHealth:
        config = self._config
        return NodeHealth(
            inventory,
            config.state_dir,
            link=NvmlLink(SYSFS) if config.gpus == AUTO else None,
            attempts=lambda: self._orders.attempts,
            changed=lambda: self._link.report_inventory(inventory),
            interval_seconds=config.health_interval_seconds,
            sysfs=SYSFS,
            shareable=config.shareable_gpus,
        )

    def _watch_disk(self, runtime: Runtime) -> DiskWatch:
        return DiskWatch(
            self._config.state_dir,
            lambda: self._orders.attempts,
            runtime.output_directory,
            self._ends,
            work_bytes_max=self._config.work_bytes_max,
            reserve_bytes=self._config.disk_reserve_bytes,
        )

    def _follow_cpus(self, inventory: resources_pb2.Inventory, runtime: Runtime) -> HotPlug:
        async def heal() -> None:
            if isinstance(runtime, HotPlugRuntime):
                await runtime.heal()

        return HotPlug(
            inventory,
            self._probe_options(),
            self._config.state_dir,
            changed=lambda: self._link.report_inventory(inventory),
            heal=heal,
            interval_seconds=self._config.health_interval_seconds,
            sysfs=SYSFS,
        )

    def _contention(self, runtime: Runtime, bandwidth: NodeBandwidth, sight: SampleSources) -> ContentionLink:
        config = self._config
        sampler = Sampler(config.node_id, runtime, bandwidth, sight, window_seconds=config.sample_interval_seconds)
        return ContentionLink(
            config.contention_endpoint,
            config.token,
            config.node_id,
            sample=sampler.sample,
            apply_directive=self._throttling.apply_directive,
            disconnected=self._throttling.disconnected,
            any_throttled=self._throttling.any_throttled,
            interval_seconds=max(SAMPLE_SECONDS_MIN, config.sample_interval_seconds),
            rng=self._rng,
            incarnation=self._incarnation,
        )

    # Messages to and from placement.

    def _hello(self) -> agent_pb2.Hello:
        return agent_pb2.Hello(
            node_id=self._config.node_id,
            inventory=self._inventory,
            attempts=self._orders.reports(),
            incarnation=self._incarnation,
            store=mark_to_wire(self._fence.store) if self._fence.store else None,
        )

    def _condition(self) -> agent_pb2.AgentCondition:
        condition = agent_pb2.AgentCondition(
            loop_lag=self._loop_lag.lag(), name_errors=NAMES.errors(), tls_error=channel.certificate_rejection()
        )
        condition.wall_time.GetCurrentTime()
        return condition

    def _accepts_store(self, welcome: agent_pb2.Welcome) -> bool:
        """Return whether the store behind placement is the known one and not older than its last seen revision."""
        shown = mark_from_wire(welcome.store)
        if shown is None:
            return True  # placement runs an older release
        if verdict := self._fence.check_store(shown, tuple(welcome.store.supersedes)):
            log.error("store_rejected", reason=verdict.mismatch.value, why=verdict.text, remedy=self._fence.remedy)
            return False
        self._fence.record_store(shown)
        return True

    def _welcome(self, welcome: agent_pb2.Welcome) -> bool:
        """Return whether to accept this leader: its term and its store must not be older than those seen before."""
        if not self._accepts_store(welcome):
            return False
        if self._fence.raise_term(welcome.term):
            self._background.start(self._persist_term())
            record(Came(self._config.node_id))
            return True
        log.error("old_term_refused", term=welcome.term, seen=self._fence.term, remedy=self._fence.remedy)
        return False

    def _acknowledged(self, sent_seconds: float) -> None:
        """Renew the lease: placement has answered a message sent at this time, in seconds since boot."""
        try:
            self._lease.renew(sent_seconds)
        except OSError as error:
            log.error("lease_renewal_failed", error=str(error))

    async def _persist_term(self) -> None:
        try:
            await self._fence.flush()
        except OSError as error:  # the term stays valid in memory; the next flush retries
            log.error("term_write_failed", term=self._fence.term, error=str(error))

    def _apply_orders(self, response: agent_pb2.ConnectResponse) -> None:
        if shown := mark_from_wire(response.store):
            self._fence.record_store(shown)
            now = clock.monotonic()
            if response.assignments or response.acks or now > self._marked_seconds + MARK_SECONDS:
                self._marked_seconds = now
                self._background.start(self._persist_term())
        for assignment in response.assignments:
            self._orders.assign(assignment)
        for resize in response.resizes:
            self._orders.resize(resize)
        for profile in response.profiles:
            self._orders.profile(profile)
        for stop in response.stops:
            self._orders.stop(stop)
        for ack in response.acks:
            self._orders.acknowledge(ack)
        if response.released_gpus:
            self._health.release(response.released_gpus)
        for read in response.reads:
            self._uploads.order(read)

    def _changed(self, status: Status) -> None:
        """Handle an attempt status from the runtime."""
        status = self._ends.with_reason(status)
        self._record_end(status)
        self._orders.changed(status)
        if status.ended:
            self._throttling.ended(status.key)

    def _record_end(self, status: Status) -> None:
        if status.ended:
            record(Over(self._config.node_id, status.key.job_id, status.key.number))

    def _is_running(self, key: AttemptKey) -> bool:
        attempt = self._orders.attempts.get(key)
        return attempt is not None and not attempt.status.ended

    def _report_progress(self, key: AttemptKey, track: ProgressTracker, rate_per_second: float, time: float) -> None:
        progress = job_pb2.Progress(
            step=track.step,
            rate_per_second=rate_per_second,
            update_time=timestamp(time),
            phase=track.phase,
            phase_step=track.phase_step if track.phase else 0,
            throttle=self._throttling.describe(key),
        )
        if (age_seconds := track.seconds_since_step(clock.monotonic())) is not None:
            progress.step_time.CopyFrom(timestamp(time - age_seconds))
        if track.loss is not None:
            progress.loss = track.loss
        if track.batch is not None:
            progress.batch_size, seconds = track.batch
            progress.batch_time.FromNanoseconds(round(seconds * 1e9))
            track.batch = None
        report = agent_pb2.ProgressReport(job_id=key.job_id, number=key.number, progress=progress)
        self._link.report_progress(report)
