"""Hydra's launcher `cotenant`: the jobs of a multirun run as jobs of a mesh.

`python train.py -m hydra/launcher=cotenant hydra.launcher.gpus=1 rate=0.1,0.01` submits one array of at most
`hydra.launcher.workers` jobs, which take the combinations one after the other. All fields of a job may be set. Hydra
finds this module in the namespace package `hydra_plugins`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from cotenant.client.job_fields import JobFields
from cotenant.client.mapping import WORKERS_DEFAULT
from cotenant.client.remote_functions import map as map_in_jobs

log = logging.getLogger(__name__)


class CotenantLauncher(Launcher):
    """Runs the jobs of a multirun on a mesh. The sweep's folder has to be visible to the nodes."""

    def __init__(self, workers: int = WORKERS_DEFAULT, python: str | None = None, **fields: Any) -> None:
        self._workers, self._python = workers, python or sys.executable
        self._fields = {name: _plain(value) for name, value in fields.items() if value is not None}
        self._config: Any = None
        self._context: HydraContext | None = None
        self._function: TaskFunction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what Hydra passes to each launcher."""
        self._context, self._function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a job for each list of overrides, and return what they returned, in order.

        Raises:
            CotenantError: the jobs cannot be submitted.
        """
        assert self._context is not None
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        log.info("Launching %d jobs on Cotenant", len(job_overrides))
        configs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
            config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(number), number
            configs.append(config)
        function, context, state = self._function, self._context, Singleton.get_state()
        fields = {"name": str(self._config.hydra.job.name), **self._fields}
        futures = map_in_jobs(
            lambda config: run_one(context, function, config, state),
            configs,
            workers=self._workers,
            python=self._python,
            **fields,
        )
        return [_returned(future) for future in futures]


def run_one(context: HydraContext, function: Any, config: DictConfig, state: Any) -> JobReturn:
    """Run one job of a multirun, on a node."""
    Singleton.set_state(state)
    setup_globals()
    with open_dict(config):
        config.hydra.job.id = os.environ.get("COTENANT_JOB_ID", str(config.hydra.job.num))
    return run_job(
        hydra_context=context,
        task_function=function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _returned(future: Future[JobReturn]) -> JobReturn:
    """Return what a job returned; a worker that died has failed its job, as an exception would have."""
    if (error := future.exception()) is None:
        return future.result()
    return JobReturn(status=JobStatus.FAILED, _return_value=error)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


CotenantLauncherConf = make_dataclass(
    "CotenantLauncherConf",
    [
        ("_target_", str, field(default=f"{__name__}.{CotenantLauncher.__name__}")),
        ("workers", int, field(default=WORKERS_DEFAULT)),
        ("python", Any, field(default=None)),
        *((name, Any, field(default=None)) for name in JobFields.__annotations__),
    ],
)
ConfigStore.instance().store(
    group="hydra/launcher", name="cotenant", node=CotenantLauncherConf, provider="cotenant_launcher"
)
