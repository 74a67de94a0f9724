"""The agent of one server: it keeps the streams to the control plane open and runs what placement assigns.

An agent may be stopped, killed or replaced at any time: jobs keep running, and the next agent re-attaches to them. It
never stops retrying an unreachable control plane and never acts without its orders, except that an agent in a job of
another system stops everything before that ends (`hand_back`).
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from dataclasses import fields
from random import Random

import structlog

from cotenant import plugins
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.history.events import Over
from cotenant.history.recording import record
from cotenant.name_resolution import NAMES
from cotenant.node_agent.control.agent_config import AgentConfig
from cotenant.node_agent.control.attempt import Attempts
from cotenant.node_agent.control.attempt_manager import AttemptManager
from cotenant.node_agent.control.container_gpu_watch import ContainerGpuWatch
from cotenant.node_agent.control.contention_link import ContentionLink
from cotenant.node_agent.control.disk_watch import DiskWatch, Evictions
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.node_agent.control.folder_source import FolderSource
from cotenant.node_agent.control.hand_back import HandBack
from cotenant.node_agent.control.leader_check import LeaderCheck
from cotenant.node_agent.control.live_profiling import LiveProfiler
from cotenant.node_agent.control.machine_claims import claim_machine
from cotenant.node_agent.control.node_description import NodeDescription
from cotenant.node_agent.control.node_health import NodeHealth
from cotenant.node_agent.control.output_upload import OutputUploads
from cotenant.node_agent.control.placement_link import PlacementLink
from cotenant.node_agent.control.placement_orders import PlacementOrders
from cotenant.node_agent.control.placement_outbox import PlacementOutbox
from cotenant.node_agent.control.progress_reader import ProgressReader
from cotenant.node_agent.control.progress_reports import ProgressReports
from cotenant.node_agent.control.sampler import Sampler, SampleSources
from cotenant.node_agent.control.secret_source import SecretSource
from cotenant.node_agent.control.session_host import SessionHost
from cotenant.node_agent.control.state_directory import open_state_directory
from cotenant.node_agent.control.throttle_directives import ThrottleDirectives
from cotenant.node_agent.control.throttles import Throttles
from cotenant.node_agent.probes.gpus import AUTO
from cotenant.node_agent.probes.hot_plug import HotPlug
from cotenant.node_agent.probes.inventory import SYSFS, ProbeOptions, probe
from cotenant.node_agent.probes.memory_bandwidth import NodeBandwidth
from cotenant.node_agent.probes.nvml_link import NvmlLink
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.runtime_port import HotPlugRuntime, Runtime, RuntimeContext
from cotenant.node_agent.runtime.socket_paths import remove_socket_directory, socket_directory
from cotenant.node_agent.runtime.uploaded_folder import UploadedFolders
from cotenant.node_agent.supervisor.lease import LEASE, Lease, boot_id
from cotenant.rpc import channel
from cotenant.rpc.loop_lag import LoopLagMonitor
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.security.certificate_expiry import CertificateExpiry
from cotenant.v1 import job_pb2, resources_pb2

log = structlog.get_logger()

__all__ = ["Agent", "AgentConfig"]

SAMPLE_SECONDS_MIN = 0.05


class Agent:
    """One node's agent. `run` may be called once."""

    def __init__(
        self, config: AgentConfig, runtime: Runtime | None = None, on_start: Callable[[], None] = lambda: None
    ) -> None:
        self._config, self._runtime, self._on_start = config, runtime, on_start

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; running jobs keep running, but in a job of another system they are stopped.

        Raises:
            AgentAlreadyRunning: another agent uses the state directory or parts of the machine.
            NodeMismatch: the state directory belongs to another node.
        """
        config, incarnation = self._config, uuid.uuid4().hex
        locks = [open_state_directory(config.state_dir, config.node_id)]
        log.info("agent_starting", node=config.node_id, incarnation=incarnation)
        try:
            options = _probe_options(config)
            inventory = await asyncio.to_thread(probe, options, sysfs=SYSFS)
            if not config.share_machine:
                locks += await asyncio.to_thread(claim_machine, config.node_id, config.state_dir, inventory)
            runtime: Runtime = self._runtime or plugins.load("cotenant.runtimes", config.runtime)
            await _Parts(config, incarnation, runtime, inventory, options).serve(stop, self._on_start)
        finally:
            for lock in locks:
                os.close(lock)
        log.info("agent_stopped", node=config.node_id)


class _Parts:
    """All parts of an agent. Each is given the parts that it uses, so they are made in this order."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        runtime: Runtime,
        inventory: resources_pb2.Inventory,
        options: ProbeOptions,
    ) -> None:
        self.config, self.runtime, self.inventory = config, runtime, inventory
        node_id, state_dir, interval_seconds = config.node_id, config.state_dir, config.health_interval_seconds
        rng = Random(incarnation)  # for jitter, not for security
        attempts, outbox, throttles = Attempts(), PlacementOutbox(), Throttles(runtime)
        self.outbox = outbox
        fence = EpochFence(state_dir / "fence.jsonl", node_id)
        reports = ProgressReports(outbox, throttles)
        self.progress = ProgressReader(socket_directory(state_dir), reports.report)
        self.profiles = LiveProfiler(runtime, self.progress, outbox.report_profile)
        self.bandwidth = NodeBandwidth.open(config.memory_bandwidth_peak)
        self.directives = ThrottleDirectives(
            throttles, attempts, self.profiles, self.progress,
            window_seconds=config.sample_interval_seconds, bandwidth_enforced=self.bandwidth.enforced,
        )  # fmt: skip
        self.health = NodeHealth(
            inventory, state_dir, link=_nvml_link(config), attempts=attempts,
            report=outbox.report_inventory, interval_seconds=interval_seconds, sysfs=SYSFS,
            shareable=config.shareable_gpus,
        )  # fmt: skip
        self.manager = AttemptManager(
            node_id, attempts, outbox, runtime, fence, self.progress, self.profiles, throttles, self.health
        )
        self.hand_back = HandBack(config.nesting, self.manager, outbox, self.health.drain) if config.nesting else None
        self.uploads = OutputUploads(runtime.output_directory, attempts)
        self.sessions = SessionHost(runtime, attempts)
        self.loop_lag = LoopLagMonitor()
        self.leader = LeaderCheck(node_id, fence, Lease(str(state_dir / LEASE)))
        self.placement = PlacementLink(
            config.placement_endpoint, config.token, outbox,
            NodeDescription(node_id, incarnation, inventory, self.manager, fence, self.loop_lag),
            self.leader, PlacementOrders(self.manager, self.health, self.uploads, self.sessions), rng,
        )  # fmt: skip
        self.folders = UploadedFolders(
            state_dir, FolderSource(node_id, self.placement.folders, rng), config.folder_cache_bytes
        )
        self.secrets = SecretSource(node_id, self.placement.secrets, rng)
        self.evictions = Evictions(runtime.stop)
        self.disk = DiskWatch(
            state_dir, attempts, runtime.output_directory, self.evictions,
            work_bytes_max=config.work_bytes_max, reserve_bytes=config.disk_reserve_bytes,
        )  # fmt: skip
        self.hot_plug = HotPlug(
            inventory, options, state_dir, report=outbox.report_inventory,
            heal=runtime.heal if isinstance(runtime, HotPlugRuntime) else None,
            interval_seconds=interval_seconds, sysfs=SYSFS,
        )  # fmt: skip
        self.container_gpus = ContainerGpuWatch(inventory, runtime, outbox.report_inventory, interval_seconds)
        sources = SampleSources(
            attempts, self.progress.rate_over, self.profiles.in_progress, throttles.held,
            self.health.utilisation_percent,
        )  # fmt: skip
        window_seconds = config.sample_interval_seconds
        sampler = Sampler(node_id, runtime, self.bandwidth, sources, window_seconds=window_seconds)
        self.contention = ContentionLink(
            config.contention_endpoint, config.token, node_id, sample=sampler.sample,
            apply_directive=self.directives.apply_directive, disconnected=self.directives.disconnected,
            any_throttled=throttles.any_throttled, interval_seconds=max(SAMPLE_SECONDS_MIN, window_seconds),
            rng=rng, incarnation=incarnation,
        )  # fmt: skip
        self.background = BackgroundTasks()

    async def serve(self, stop: asyncio.Event, on_start: Callable[[], None]) -> None:
        """Re-attach to the jobs that run, and serve until `stop` is set."""
        try:
            await self.health.open()
            for found in await self.runtime.open(self._context(), self._changed):
                self.manager.recover(found)
                self._record_end(found.status)
            self.directives.recover()
            self.inventory.not_enforced.extend(self.runtime.not_enforced())
            self._start()
            on_start()
            await (self.hand_back.run(stop) if self.hand_back else stop.wait())
        finally:
            await self._close()

    def _start(self) -> None:
        """Start everything that runs until the agent ends."""
        for name, run in {
            "health": self.health.run,
            "loop_lag": self.loop_lag.run,
            "name_checks": NAMES.run,
            "cpus": self.hot_plug.run,
            "container_gpus": self.container_gpus.run,
            "disk_watch": self.disk.run,
            "placement_link": self.placement.run,
        }.items():
            self.background.forever(name, run)
        if shown := channel.shown():
            self.background.start(CertificateExpiry(shown).run())
        if self.config.contention_endpoint:
            self.background.forever("contention_link", self.contention.run)

    async def _close(self) -> None:
        await self.directives.close()
        self.bandwidth.close()
        await self.profiles.close()
        await self.placement.flush_outbox()
        for part in (
            *(self.background, self.uploads, self.sessions, self.manager, self.progress),
            *(self.runtime, self.health, self.leader),
        ):
            await part.close()
        if all(attempt.status.ended for attempt in self.manager.attempts.values()):
            remove_socket_directory(self.config.state_dir)

    def _context(self) -> RuntimeContext:
        return RuntimeContext(
            node_id=self.config.node_id,
            state_dir=self.config.state_dir,
            inventory=self.inventory,
            output_bytes_max=self.config.output_bytes_max,
            kept_max=self.config.kept_max,
            kept_seconds_max=self.config.kept_seconds_max,
            settings=self.config,
            folders=self.folders,
            secrets=self.secrets,
            gpu_minors=self.health.gpu_minors,
            users=self.config.users,
            shared_identity=self.config.shared_identity,
            hidden=self.config.hidden,
            mounts_allowed=self.config.container_mounts,
            nesting=self.config.nesting,
            tell_launch=self._tell_launch,
        )

    def _tell_launch(self, key: AttemptKey, phrase: str) -> None:
        """Report what a launch is doing."""
        progress = job_pb2.Progress(launch=f"{self.config.node_id} is {phrase}" if phrase else "")
        self.outbox.report_progress(agent_pb2.ProgressReport(job_id=key.job_id, number=key.number, progress=progress))

    def _changed(self, status: Status) -> None:
        """Handle an attempt status from the runtime."""
        status = self.evictions.with_reason(status)
        self._record_end(status)
        self.manager.changed(status)
        if status.ended:
            self.directives.ended(status.key)
            self.sessions.attempt_ended(status.key)

    def _record_end(self, status: Status) -> None:
        if status.ended:
            record(Over(self.config.node_id, status.key.job_id, status.key.number))


def _nvml_link(config: AgentConfig) -> NvmlLink | None:
    given = config.nesting.job.gpus if config.nesting else None
    return NvmlLink(SYSFS, given=given) if config.gpus == AUTO else None


def _probe_options(config: AgentConfig) -> ProbeOptions:
    given = {each.name: getattr(config, each.name) for each in fields(ProbeOptions) if each.name != "machine"}
    own = {"address": config.address or config.node_id, "machine": "" if config.share_machine else boot_id()}
    return ProbeOptions(**{**given, **own})
