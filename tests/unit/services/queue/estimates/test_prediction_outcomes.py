"""Predictions are believed as far as ended jobs allow: in explanations, forecasts and what-if, after a restart too."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.unit.services.mesh import Mesh, running, spec

from cotenant.codec.specs import seconds
from cotenant.services.queue.estimates.prediction_outcomes import PredictionOutcomes
from cotenant.services.queue.jobs.queue_state import State
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.predictor_service_pb2 import Estimate

EXPECTED = Duration(seconds=600)
WRONG = 12


async def estimated(mesh: Mesh, job_id: str) -> Estimate:
    response: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return response.estimate


async def test_a_predictor_that_was_wrong_is_believed_less() -> None:
    async with running() as mesh:
        waiting = await mesh.submit(gpus=4, name="other", expected_duration=EXPECTED)
        await mesh.refused(waiting, "NO_NODES")
        told = await estimated(mesh, waiting)
        assert told.record.summary == "history: none of its predictions has been judged yet"
        assert (seconds(told.remaining), told.record.jobs, told.record.confidence_max) == (600.0, 0, 1.0)

        await mesh.agent("n1", gpus=1, run_seconds=0.0)
        state: State = mesh.parts["queue"].service.state
        for number in range(WRONG):
            short = await mesh.submit(gpus=1, name=f"short{number}", expected_duration=EXPECTED)
            await mesh.reach(short, "SUCCEEDED")
        after = await estimated(mesh, waiting)
        assert after.record.summary.startswith("history: of its last 12 predictions for tenant ")
        assert (after.record.jobs, after.record.within_twice, after.confidence) == (WRONG, 0.0, 0.0)
        assert after.record.median_factor == pytest.approx(600, rel=0.5)
        assert seconds(after.remaining) == seconds(told.remaining) == 600
        assert seconds(after.remaining_p10) < 10
        kept = state.records[waiting].prediction
        assert kept is not None
        assert kept[:3] == (600.0, told.confidence, "history")  # the order's is as told
        assert kept.band_seconds is None, "none was told"

        answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=1, expected_duration=EXPECTED)))
        assert answer.estimate.record.jobs == WRONG

        restarted = State()
        await PredictionOutcomes(restarted).start(state.records.values())
        for tenant in ("", state.records[waiting].spec.tenant):
            assert restarted.judged.trust("history", tenant) == state.judged.trust("history", tenant)
