"""What is known of the node's health, kept across restarts of the agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from cotenant.core.model.health import NO_ERA, Era, Finding
from cotenant.core.model.health_rules import RULES, TABLE_VERSION
from cotenant.node_agent.supervisor.state_file import StateFile

log = structlog.get_logger()

NAME = "health.json"
CAPACITY_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Remembered:
    """What stands, and the GPUs that there were in that era, as the process that asks NVML told of them."""

    findings: tuple[Finding, ...] = ()
    gpus: tuple[dict[str, Any], ...] = ()
    era: Era = NO_ERA


class HealthFile:
    """One file in the agent's directory. Blocks while it is written."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / NAME
        self._file = StateFile(str(self._path), CAPACITY_BYTES)

    def read(self) -> Remembered:
        """What was kept; a finding that cannot be read is left out, and told of."""
        try:
            raw = json.loads(self._path.read_bytes())
            findings = tuple(finding for each in raw["findings"] if (finding := _finding(each)))
            return Remembered(findings, tuple(raw["gpus"]), Era(str(raw["boot"]), str(raw["driver"])))
        except FileNotFoundError:
            return Remembered()
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            log.error("health_file_unreadable", path=str(self._path), error=f"{type(error).__name__}: {error}")
            return Remembered()

    def write(self, remembered: Remembered) -> None:
        """Keep it. Where the disk does not take it, that is told of, and the next change tries again."""
        try:
            self._file.write(
                {
                    "table_version": TABLE_VERSION,
                    "boot": remembered.era.boot,
                    "driver": remembered.era.driver,
                    "gpus": list(remembered.gpus),
                    "findings": [_written(finding) for finding in remembered.findings],
                }
            )
        except OSError as error:
            log.error("health_not_recorded", error=str(error))


def _written(finding: Finding) -> dict[str, object]:
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


def _finding(raw: Mapping[str, Any]) -> Finding | None:
    finding = Finding(
        rule=str(raw["rule"]),
        detail=str(raw["detail"]),
        gpu_uuid=str(raw["gpu_uuid"]),
        mark=str(raw["mark"]),
        since=float(raw["since"]),
        lasted_seconds=float(raw["lasted_seconds"]),
        calm_seconds=float(raw["calm_seconds"]),
        era=Era(str(raw["boot"]), str(raw["driver"])),
    )
    if finding.rule not in RULES:  # another version's
        log.warning("finding_dropped", rule=finding.rule, gpu=finding.gpu_uuid)
        return None
    return finding
