"""`cotenant predict` against a mesh with a real predictor that learns from observations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import TOKEN, Standin

from cotenant.cli.outcome import ExitCode
from cotenant.cli.prediction_record import record_view, records_of
from cotenant.cli.research.predicting import judging
from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.internal.v1 import observation_service_pb2_grpc
from cotenant.rpc.channel import connect
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.security import identity
from cotenant.security.identity import Identity
from cotenant.security.permissions import Role
from cotenant.services.predictor.api.server import Config, RunningPredictor, start
from cotenant.store.memory import MemoryStore
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import predictor_service_pb2 as pb

PREDICTORS = ("xiao-piecewise", "history", "latency")


@dataclass
class Taught:
    """A predictor and a sender of observations."""

    standin: Standin
    address: str = ""
    now: int = 1_000_000
    _alive: list[tuple[Server, RunningPredictor]] = field(default_factory=list)

    def start(self) -> None:
        self.standin.do(self._start())

    def stop(self) -> None:
        self.standin.do(self._stop())

    def saw(self, *observations: observation_pb2.Observation) -> None:
        self.standin.do(self._saw(observations))

    def rates(self, rates: dict[int, float], **fields: Any) -> None:
        """Report rates by cores."""
        self.saw(*(self.observation(cores, rate_per_second=rate, **fields) for cores, rate in rates.items()))

    def observation(self, cores: int = 4, **fields: Any) -> observation_pb2.Observation:
        self.now += 10
        given: dict[str, Any] = {
            "job_id": f"j{self.now}",
            "number": 1,
            "spec": spec(),
            "allocation": pb.CandidateAllocation(cores=cores, gpu_milli=1000),
            "window": Duration(seconds=10),
            "time": Timestamp(seconds=self.now),
        }
        return observation_pb2.Observation(**(given | fields))

    async def _start(self) -> None:
        server = Server(token=TOKEN)
        predicting = await start(server, MemoryStore(), serve_policies(server), Config(predictors=PREDICTORS))
        self.address = f"127.0.0.1:{await server.start()}"
        self._alive.append((server, predicting))
        while not predicting_is_ready(await self._send(())):
            pass

    async def _saw(self, observations: Sequence[observation_pb2.Observation]) -> None:
        assert (await self._send(observations)).accepted == len(observations)

    async def _send(self, observations: Sequence[observation_pb2.Observation]) -> observation_pb2.ObserveResponse:
        async with connect(self.address, TOKEN) as channel:
            stub = observation_service_pb2_grpc.ObservationServiceStub(channel)
            answer: observation_pb2.ObserveResponse = await stub.Observe(
                observation_pb2.ObserveRequest(observations=observations)
            )
            return answer

    async def _stop(self) -> None:
        for server, predicting in self._alive:
            await server.stop(0)
            await predicting.close()


def predicting_is_ready(answer: observation_pb2.ObserveResponse) -> bool:
    return not answer.rejected


def spec(model: str = "resnet50", **fields: Any) -> job_pb2.JobSpec:
    request = resources_pb2.ResourceRequest(gpu_milli=1000, cores=4)
    given: dict[str, Any] = {"model": model, "roles": [job_pb2.Role(name="worker", replicas=1, resources=request)]}
    return job_pb2.JobSpec(**(given | fields))


@pytest.fixture
def taught(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Iterator[Taught]:
    made = Taught(standin)
    made.start()
    monkeypatch.setenv("COTENANT_ENDPOINT", f"queue={standin.address},predictor={made.address}")
    yield made
    made.stop()


def test_a_job_of_a_known_model_is_estimated_for_each_candidate(shell: Shell, taught: Taught) -> None:
    taught.rates({1: 10.0, 2: 20.0, 4: 39.0, 16: 60.0})
    options = ("--model", "resnet50", "--gpus", "1", "--steps", "6000", "--cpus", "16", "--cores", "2,4")
    [reported] = shell("predict", "job", *options, "--json").json
    assert (reported["predictable"], reported["cores_useful"]) == (True, 6)
    assert reported["remaining_seconds"] == pytest.approx(100, rel=0.05)
    assert reported["remaining_p10_seconds"] < reported["remaining_seconds"] < reported["remaining_p90_seconds"]
    assert [(one["cores"], round(one["rate_per_second"])) for one in reported["candidates"]] == [
        (16, 60),
        (2, 20),
        (4, 39),
    ]
    assert reported["source"].startswith("xiao-piecewise: 6000 steps left")
    ended = shell("predict", "job", *options)
    assert "1m40s (" in ended.out
    assert "6 per replica (θ)" in ended.out
    assert ended.out.splitlines()[-4].split() == ["CORES", "NODES", "STEPS/S", "REMAINING", "CONFIDENCE"]
    assert ended.out.splitlines()[-2].split()[:4] == ["2", "1", "20", "5m00s"]


def test_a_user_of_one_tenant_may_estimate_its_own_jobs(
    shell: Shell, taught: Taught, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to measure next is only for callers with access to all tenants; the estimate works without it."""
    taught.rates({1: 10.0, 2: 20.0, 4: 39.0}, spec=spec(tenant="lab"))
    monkeypatch.setattr(identity, "OPERATOR", Identity("eve", frozenset({Role.USER}), frozenset({"lab"})))
    options = ("predict", "job", "--gpus", "1", "--cpus", "4", "--json")
    [reported] = shell(*options, "--model", "resnet50", "--steps", "6000").json
    assert (reported["predictable"], round(reported["candidates"][0]["rate_per_second"])) == (True, 39)
    [unknown] = shell(*options, "--model", "bert").json
    assert (unknown["predictable"], unknown.get("next")) == (False, None)
    assert "NOT_YOUR_TENANT" in shell(*options, "--tenant", "default").err


def test_an_unknown_job_is_unpredictable_with_reason_and_hints(shell: Shell, taught: Taught) -> None:
    [reported] = shell("predict", "job", "--gpus", "1", "--json").json
    assert not reported["predictable"]
    assert reported["source"] == "xiao-piecewise: no rate of a similar job was observed on known cores"
    assert reported["next"]["cores"][0] == 16
    assert [hint.split(" ")[1] for hint in reported["hints"]] == ["its", "its", "its", "run"]
    ended = shell("predict", "job", "--gpus", "1", "--model", "resnet50", "--steps", "10")
    assert (ended.code, ended.out.splitlines()[1]) == (ExitCode.DONE, "remaining     unknown")
    assert "hint" in ended.out
    assert "tell its steps" not in ended.out


def test_a_service_gets_its_latency_and_the_replicas_for_its_objective(
    shell: Shell, taught: Taught, tmp_path: Path
) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(
        "name: recommender\nkind: inference\nmodel: dlrm\ngpus: 0.5\ncpus: 2\ncommand: [serve]\n"
        "qos: {latency: 50ms, percentile: 99, arrivals: 400}\n"
    )
    [reported] = shell("predict", "job", str(path), "--json").json
    assert reported["candidates"][0]["latency"] is None
    assert "progress.batch" in reported["hints"][0]
    request = resources_pb2.ResourceRequest(gpu_milli=500, cores=2)
    service = spec("dlrm", kind=job_pb2.JOB_KIND_INFERENCE, roles=[job_pb2.Role(replicas=1, resources=request)])
    allocation = pb.CandidateAllocation(cores=2, gpu_milli=500)
    for size in (1, 2, 4, 8, 16):
        batch_time = Duration(nanos=int((0.002 * size + 0.01) * 1e9))
        taught.saw(taught.observation(spec=service, allocation=allocation, batch_size=size, batch_time=batch_time))
    [reported] = shell("predict", "job", str(path), "--json").json
    latency = reported["candidates"][0]["latency"]
    assert latency["p95_seconds"] < latency["p99_seconds"]
    assert latency["replicas_needed"] == 2
    out = shell("predict", "job", str(path)).out
    assert "99th " in out
    assert "2 to meet the latency objective" in out


def test_invalid_estimate_requests_are_bad_usage(shell: Shell, taught: Taught, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("gpu: 1\ncommand: [x]\n")
    for arguments, reported in (
        (("--cores", "1,x"), "--cores: must be a whole number"),
        (("--cores", "0"), "--cores: must be from 1 to"),
        (("--cores", ",".join(map(str, range(1, 99)))), "more than 64 candidates"),
        ((str(tmp_path / "bad.yaml"),), "bad.yaml:1:1: unknown job field 'gpu'; did you mean gpus?"),
    ):
        ended = shell("predict", "job", *arguments)
        assert (ended.code, ended.out) == (ExitCode.USAGE, "")
        assert reported in ended.err


def test_predict_without_a_mesh_is_unreachable(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_ENDPOINT", "queue=127.0.0.1:1")
    ended = shell("predict", "job", "--gpus", "1")
    assert (ended.code, "the service cannot be reached" in ended.err) == (ExitCode.UNREACHABLE, True)


def test_the_profile_of_a_model_is_shown(shell: Shell, taught: Taught) -> None:
    taught.rates({1: 10.0, 2: 20.0, 4: 39.0, 16: 60.0})
    taught.rates({4: 90.0}, phase="validation")
    taught.rates({4: 2.0}, spec=spec("vgg", tenant="vision"))
    for run in range(5):
        end: dict[str, Any] = {"run_time": Duration(seconds=600 + run), "succeeded": True}
        taught.saw(taught.observation(spec=spec("", name="nightly"), window=None, **end))
    known = shell("predict", "show", "--json").json
    assert [(one["user"], one["model"] or one["name"]) for one in known] == [
        ("default", "nightly"),
        ("default", "resnet50"),
        ("vision", "vgg"),
    ]
    nightly, resnet, _ = known
    history = next(one for one in nightly["estimates"] if one["source"].startswith("history: "))
    assert history["predictable"]
    assert history["remaining_seconds"] == pytest.approx(602, abs=2)
    training, validation = resnet["settings"]
    assert (training["theta"]["cores"], training["theta"]["low"], training["theta"]["high"]) == (6, 5, 7)
    assert [rate["cores"] for rate in training["rates"]] == [1, 2, 4, 16]
    assert (validation["phase"], validation["theta"], training["stale"]) == ("validation", None, None)
    table = shell("predict", "show").out.splitlines()
    assert [line.split()[0] for line in table] == ["MODEL", "nightly", "resnet50", "vgg"]
    out = shell("predict", "show", "resnet50").out
    assert "60 on 16 (×1)" in out
    assert "6 cores (5 to 7 at 90 %, confidence" in out
    assert "rates validation" in out
    assert [one["model"] for one in shell("predict", "show", "--user", "vision", "--json").json] == ["vgg"]
    ended = shell("predict", "show", "resnet5")
    assert (ended.code, "no profile of 'resnet5'" in ended.err) == (ExitCode.FAILED, True)


def test_outdated_rates_are_shown_as_stale(shell: Shell, taught: Taught) -> None:
    taught.rates({4: 40.0, 8: 70.0})
    assert shell("predict", "show", "--json").json[0]["settings"][0]["stale"] is None
    for _ in range(3):
        taught.rates({4: 20.0})
    [known] = shell("predict", "show", "--json").json
    assert known["settings"][0]["stale"]
    assert "stale" in shell("predict", "show").out.splitlines()[1].split()
    assert known["settings"][0]["stale"] in shell("predict", "show", "resnet50").out


def ended(tenant: str, source: str, predicted: float | None, ran: float) -> job_pb2.Job:
    job = job_pb2.Job(spec=job_pb2.JobSpec(tenant=tenant), prediction_source=source)
    job.run_time.FromNanoseconds(int(ran * 1e9))
    if predicted is not None:
        job.predicted_run_time.FromNanoseconds(int(predicted * 1e9))
    return job


def test_the_record_is_by_predictor_and_by_tenant_if_there_are_several() -> None:
    jobs = [
        ended("vision", "history", 100.0, 100.0),
        ended("speech", "history", 400.0, 100.0),
        ended("vision", "progress", 60.0, 60.0),
        ended("vision", "", 60.0, 90.0),
    ]
    found = records_of(jobs)
    assert [judging.row(*one) for one in found.items()] == [
        ("history", "all", "2", "2.00×", "50 %", "2.00", ""),
        ("history", "speech", "1", "4.00×", "0 %", "4.00", ""),
        ("history", "vision", "1", "1.00×", "100 %", "1.00", ""),
        ("progress", "all", "1", "1.00×", "100 %", "1.00", ""),
        ("unknown", "all", "1", "1.50×", "100 %", "0.67", ""),
    ]
    assert record_view(*next(iter(found.items())))["tenant"] is None
