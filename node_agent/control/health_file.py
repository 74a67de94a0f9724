"""Persists the node's health across restarts of the agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from cotenant.core.model.health import UNKNOWN_BOOT, BootInstance, Finding
from cotenant.core.model.health_rules import RULES, TABLE_VERSION
from cotenant.node_agent.supervisor.state_file import StateFile

log = structlog.get_logger()

NAME = "health.json"
CAPACITY_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """The current findings, and the GPUs of this boot and driver load as NVML reported them."""

    findings: tuple[Finding, ...] = ()
    gpus: tuple[dict[str, Any], ...] = ()
    era: BootInstance = UNKNOWN_BOOT


class HealthFile:
    """One file in the agent's directory. Writing blocks."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / NAME
        self._file = StateFile(str(self._path), CAPACITY_BYTES)

    def read(self) -> HealthSnapshot:
        """Return the saved snapshot, empty if it is unreadable; findings of unknown rules are skipped."""
        try:
            raw = json.loads(self._path.read_bytes())
            findings = tuple(finding for each in raw["findings"] if (finding := _finding_from_json(each)))
            return HealthSnapshot(findings, tuple(raw["gpus"]), BootInstance(str(raw["boot"]), str(raw["driver"])))
        except FileNotFoundError:
            return HealthSnapshot()
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            log.error("health_file_unreadable", path=str(self._path), error=f"{type(error).__name__}: {error}")
            return HealthSnapshot()

    def write(self, remembered: HealthSnapshot) -> None:
        """Save the snapshot. A disk error is logged, and the next change retries."""
        try:
            self._file.write(
                {
                    "table_version": TABLE_VERSION,
                    "boot": remembered.era.boot,
                    "driver": remembered.era.driver,
                    "gpus": list(remembered.gpus),
                    "findings": [_finding_to_json(finding) for finding in remembered.findings],
                }
            )
        except OSError as error:
            log.error("health_write_failed", error=str(error))


def _finding_to_json(finding: Finding) -> dict[str, object]:
    return {
        "rule": finding.rule,
        "detail": finding.detail,
        "gpu_uuid": finding.gpu_uuid,
        "mark": finding.mark,
        "since": finding.since,
        "lasted_seconds": finding.lasted_seconds,
        "calm_seconds": finding.calm_seconds,
        "boot": finding.era.boot,
        "driver": finding.era.driver,
    }


def _finding_from_json(raw: Mapping[str, Any]) -> Finding | None:
    finding = Finding(
        rule=str(raw["rule"]),
        detail=str(raw["detail"]),
        gpu_uuid=str(raw["gpu_uuid"]),
        mark=str(raw["mark"]),
        since=float(raw["since"]),
        lasted_seconds=float(raw["lasted_seconds"]),
        calm_seconds=float(raw["calm_seconds"]),
        era=BootInstance(str(raw["boot"]), str(raw["driver"])),
    )
    if finding.rule not in RULES:  # a rule of another version
        log.warning("health_finding_dropped", rule=finding.rule, gpu=finding.gpu_uuid)
        return None
    return finding
