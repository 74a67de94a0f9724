"""The agent of one server: holds the lines to the control plane and runs what placement assigns.

It may be stopped, killed and replaced at any time: jobs run on, and the next agent takes them up. It never gives up
on a control plane that is away, and never acts without it.
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
from cotenant.history.events import Came, Over
from cotenant.history.recording import record
from cotenant.name_resolution import NAMES
from cotenant.node_agent.control.agent_config import AgentConfig
from cotenant.node_agent.control.attempt_manager import Orders
from cotenant.node_agent.control.contention_link import ContentionLink
from cotenant.node_agent.control.disk_watch import DiskWatch, EnforcedEnds
from cotenant.node_agent.control.epoch_fence import Fence
from cotenant.node_agent.control.live_profiling import Profiles
from cotenant.node_agent.control.machine_claims import take_machine
from cotenant.node_agent.control.node_health import Health
from cotenant.node_agent.control.output_upload import OutputUploads
from cotenant.node_agent.control.placement_link import PlacementLink
from cotenant.node_agent.control.progress import Track
from cotenant.node_agent.control.progress_reader import ProgressReader
from cotenant.node_agent.control.sampler import Sampler, Sight
from cotenant.node_agent.control.state_directory import open_state_directory
from cotenant.node_agent.control.throttle_directives import Throttling
from cotenant.node_agent.probes.gpus import AUTO
from cotenant.node_agent.probes.hot_plug import HotPlug
from cotenant.node_agent.probes.inventory import SYSFS, ProbeWishes, probe
from cotenant.node_agent.probes.memory_bandwidth import NodeBandwidth
from cotenant.node_agent.probes.nvml_link import NvmlLink
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status, timestamp
from cotenant.node_agent.runtime.runtime_port import Heals, Runtime, RuntimeContext
from cotenant.node_agent.runtime.socket_paths import remove_socket_directory, socket_directory
from cotenant.node_agent.supervisor.lease import LEASE, Lease, boot_id
from cotenant.rpc import channel
from cotenant.rpc.loop_lag import Stalls
from cotenant.rpc.store_marks import mark_from_wire, mark_to_wire
from cotenant.rpc.task_group import Background
from cotenant.security.certificate_expiry import Expiry
from cotenant.v1 import job_pb2, node_service_pb2, resources_pb2

log = structlog.get_logger()

__all__ = ["Agent", "AgentConfig"]

SAMPLE_SECONDS_MIN = 0.05
MARK_SECONDS = 10.0  # between two writes of how far the store is, where nothing else is written


class Agent:
    """Everything of one node, wired up. `run` may be called once."""

    def __init__(
        self, config: AgentConfig, runtime: Runtime | None = None, on_start: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._on_start = on_start
        self._incarnation = uuid.uuid4().hex
        self._background = Background()
        self._marked_seconds = 0.0  # when it was last written down how far the store is
        self._stalls = Stalls()
        self._rng = Random(self._incarnation)  # spreads retries, guards nothing

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; what runs then, runs on.

        Raises:
            AnotherAgent: the state directory is in use, or parts of the machine are.
            AnotherNode: it is another node's.
        """
        state_dir = self._config.state_dir
        locks = [open_state_directory(state_dir, self._config.node_id)]
        log.info("agent_starting", node=self._config.node_id, incarnation=self._incarnation)
        try:
            inventory = await asyncio.to_thread(probe, self._wishes(), sysfs=SYSFS)
            if not self._config.share_machine:
                locks += await asyncio.to_thread(take_machine, self._config.node_id, state_dir, inventory)
            await self._serve(inventory, stop)
        finally:
            for lock in locks:
                os.close(lock)
        log.info("agent_stopped", node=self._config.node_id)

    def _wishes(self) -> ProbeWishes:
        config = self._config
        return ProbeWishes(
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
        fence = Fence(config.state_dir / "fence.jsonl", config.node_id)
        progress = ProgressReader(socket_directory(config.state_dir), self._tell_progress)
        profiles = Profiles(runtime, progress, lambda report: self._link.report_profile(report))
        bandwidth = NodeBandwidth.open(config.memory_bandwidth_peak)
        throttling = self._throttling = Throttling(
            runtime, profiles, lambda: self._orders.attempts, progress.tell,
            window_seconds=config.sample_interval_seconds, bandwidth_enforced=bandwidth.enforced,
        )  # fmt: skip
        orders = Orders(
            config.node_id, runtime, fence, progress, profiles,
            lambda report: self._link.report(report), lambda report: self._link.report_resize(report),
            lambda: self._health, throttling.held_back,
        )  # fmt: skip
        self._fence, self._orders, self._inventory, self._ends = fence, orders, inventory, EnforcedEnds(runtime.stop)
        self._lease = Lease(str(config.state_dir / LEASE))
        health = self._health = self._watch(inventory)
        orders.signs_of = health.signs_of
        self._link = PlacementLink(
            config.placement_endpoint,
            config.token,
            hello=self._hello,
            welcome=self._welcome,
            obey=self._obey,
            heard=self._heard,
            patience_seconds=orders.patience_seconds,
            condition=self._condition,
            rng=self._rng,
        )
        self._uploads = OutputUploads(self._link.upload, runtime.output_directory, self._is_running)
        try:
            await health.open()
            for found in await runtime.open(self._context(inventory), self._changed):
                orders.take_up(found)
                self._record_end(found.status)
            throttling.take_up()
            inventory.not_enforced.extend(runtime.not_enforced())
            self._watch_itself()
            self._background.start(self._follow_cpus(inventory, runtime).run())
            self._background.forever("disk_watch", self._watch_disk(runtime).run)
            self._background.start(self._link.run())
            if config.contention_endpoint:
                sight = Sight(
                    lambda: orders.attempts, progress.rate_over, profiles.under_way,
                    lambda key: throttling.held(key).throttle, health.utilisation_percent,
                )  # fmt: skip
                self._background.forever("contention_link", self._contention(runtime, bandwidth, sight).run)
            self._on_start()
            await stop.wait()
        finally:
            await throttling.close()
            bandwidth.close()
            await profiles.close()
            await self._link.say_last()
            for part in (self._background, self._uploads, orders, progress, runtime, health):
                await part.close()
            self._lease.close()
            if all(attempt.status.ended for attempt in orders.attempts.values()):
                remove_socket_directory(config.state_dir)

    def _watch_itself(self) -> None:
        """Begin to watch the node's health and the agent's certificate, event loop and names."""
        self._background.start(self._health.run())
        self._background.start(self._watch_certificate())
        self._background.start(self._stalls.run())
        self._background.forever("name_checks", NAMES.run)

    async def _watch_certificate(self) -> None:
        if shown := channel.shown():
            await Expiry(shown).run()

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

    def _watch(self, inventory: resources_pb2.Inventory) -> Health:
        config = self._config
        return Health(
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
            if isinstance(runtime, Heals):
                await runtime.heal()

        return HotPlug(
            inventory,
            self._wishes(),
            self._config.state_dir,
            changed=lambda: self._link.report_inventory(inventory),
            heal=heal,
            interval_seconds=self._config.health_interval_seconds,
            sysfs=SYSFS,
        )

    def _contention(self, runtime: Runtime, bandwidth: NodeBandwidth, sight: Sight) -> ContentionLink:
        config = self._config
        sampler = Sampler(config.node_id, runtime, bandwidth, sight, window_seconds=config.sample_interval_seconds)
        return ContentionLink(
            config.contention_endpoint,
            config.token,
            config.node_id,
            sample=sampler.sample,
            obey=self._throttling.obey,
            away=self._throttling.away,
            holding=self._throttling.holding,
            interval_seconds=max(SAMPLE_SECONDS_MIN, config.sample_interval_seconds),
            rng=self._rng,
            incarnation=self._incarnation,
        )

    # What is said to placement, and heard.

    def _hello(self) -> node_service_pb2.Hello:
        return node_service_pb2.Hello(
            node_id=self._config.node_id,
            inventory=self._inventory,
            attempts=self._orders.reports(),
            incarnation=self._incarnation,
            store=mark_to_wire(self._fence.store) if self._fence.store else None,
        )

    def _condition(self) -> node_service_pb2.AgentCondition:
        condition = node_service_pb2.AgentCondition(loop_lag=self._stalls.lag(), name_errors=NAMES.errors())
        condition.wall_time.GetCurrentTime()
        return condition

    def _trusts(self, welcome: node_service_pb2.Welcome) -> bool:
        """Whether the store behind placement is no older than what was seen, and no other one."""
        shown = mark_from_wire(welcome.store)
        if shown is None:
            return True  # an older release
        if verdict := self._fence.judge_store(shown, tuple(welcome.store.supersedes)):
            log.error("store_distrusted", reason=verdict.wrong.value, why=verdict.text, remedy=self._fence.remedy)
            return False
        self._fence.remember_store(shown)
        return True

    def _welcome(self, welcome: node_service_pb2.Welcome) -> bool:
        """Whether to obey; an older leader than one that was seen is not obeyed, nor one with an older store."""
        if not self._trusts(welcome):
            return False
        if self._fence.raise_term(welcome.term):
            self._background.start(self._persist_term())
            record(Came(self._config.node_id))
            return True
        log.error("old_term_refused", term=welcome.term, seen=self._fence.term, remedy=self._fence.remedy)
        return False

    def _heard(self, sent_seconds: float) -> None:
        """Placement has answered what was sent at that time, in seconds since boot."""
        try:
            self._lease.renew(sent_seconds)
        except OSError as error:
            log.error("lease_not_renewed", error=str(error))

    async def _persist_term(self) -> None:
        try:
            await self._fence.flush()
        except OSError as error:  # it counts until we end; the next flush tries again
            log.error("term_not_recorded", term=self._fence.term, error=str(error))

    def _obey(self, response: node_service_pb2.ConnectResponse) -> None:
        if shown := mark_from_wire(response.store):
            self._fence.remember_store(shown)
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
        """The runtime tells of an attempt."""
        status = self._ends.applied(status)
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

    def _tell_progress(self, key: AttemptKey, track: Track, rate_per_second: float, time: float) -> None:
        told = job_pb2.Progress(
            step=track.step,
            rate_per_second=rate_per_second,
            update_time=timestamp(time),
            phase=track.phase,
            phase_step=track.phase_step if track.phase else 0,
            throttle=self._throttling.told(key),
        )
        if (age_seconds := track.seconds_since_step(clock.monotonic())) is not None:
            told.step_time.CopyFrom(timestamp(time - age_seconds))
        if track.loss is not None:
            told.loss = track.loss
        if track.batch is not None:
            told.batch_size, seconds = track.batch
            told.batch_time.FromNanoseconds(round(seconds * 1e9))
            track.batch = None
        self._link.report_progress(node_service_pb2.ProgressReport(job_id=key.job_id, number=key.number, progress=told))
