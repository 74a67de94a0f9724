"""What is known of a kind of job, all together: its measured rates, θ, and what each predictor says of such a job."""

from __future__ import annotations

import math

from cotenant.codec.specs import timestamp
from cotenant.core.model.estimate import Query
from cotenant.core.prediction import core_curve
from cotenant.core.prediction.chain import Chain, Failed
from cotenant.services.predictor.api.estimate_encoding import Writer
from cotenant.services.predictor.codec import Kind
from cotenant.services.predictor.profiling.profile_store import Measured
from cotenant.v1 import predictor_service_pb2 as pb


def profile_of(kind: Kind, seen_seconds: float, measured: Measured, chain: Chain, failed: Failed) -> pb.Profile:
    """Gather what is known of a kind of job: it fits a curve for each setting, which takes milliseconds."""
    user, model, name, gpu_milli, replicas = kind
    profile = pb.Profile(user=user, model=model, name=name, gpu_milli=gpu_milli, replicas=replicas)
    if math.isfinite(seen_seconds):
        profile.seen_time.CopyFrom(timestamp(seen_seconds))
    for setting, known in sorted(measured.settings(kind).items()):
        points = known.windows.points()
        if points:
            written = profile.settings.add(gpu_type=setting.gpu_type, phase=setting.phase, nodes=setting.nodes)
            written.stale = known.stale
            _write_curve(core_curve.fit(points), written)
    query = Query(user, model, name, gpu_milli, replicas)
    for predictor in chain.predictors.values():
        told = Chain([predictor], failed).estimate(query)
        Writer().write([told], [pb.EstimateQuery()], [profile.estimates.add()])
    return profile


def _write_curve(curve: core_curve.Curve, told: pb.ProfileSetting) -> None:
    for point in curve.points:
        told.rates.add(
            cores=point.cores, rate_per_second=point.rate, windows=point.windows, relative_spread=point.spread
        )
    told.levels_off = curve.levels_off
    if curve.levels_off and len(curve.points) > 1:
        told.cores_useful, (told.cores_useful_min, told.cores_useful_max) = curve.cores_useful, curve.interval
        told.cores_useful_confidence = curve.theta_confidence
