from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.services.predictor.conftest import Served, query, run

from cotenant import telemetry
from cotenant.rpc.channel import connect
from cotenant.services.predictor.__main__ import serve


async def test_a_stopped_predictor_process_saves_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "setup", lambda service: None)  # the logs are the whole process's
    store_url = f"sqlite:{tmp_path / 'state.db'}"
    for training_task in (True, False):
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(address="127.0.0.1:0", store_url=store_url, token="secret", on_start=port.set_result)
        )
        async with connect(f"127.0.0.1:{await port}", "secret") as channel:
            predictor = Served(channel)
            await predictor.until(serving=True)
            if training_task:
                await predictor.observe(*(run(f"j{seconds}", seconds=seconds) for seconds in (90, 100, 110)))
            assert (await predictor.estimate(query()))[0].predictable
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


def test_running_the_module_prints_how_to_start_the_service() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cotenant.services.predictor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "start this service with: cotenant serve predictor\n"
