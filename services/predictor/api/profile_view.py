"""Profiles of job classes for the API: measured rates, θ, and each predictor's estimate."""

from __future__ import annotations

import math

from cotenant.codec.specs import timestamp
from cotenant.core.model.estimate import Query
from cotenant.core.prediction import core_curve
from cotenant.core.prediction.chain import Chain, Failed
from cotenant.services.predictor.api.estimate_encoding import EstimateWriter
from cotenant.services.predictor.codec import JobClass
from cotenant.services.predictor.profiling.profile_store import ProfileStore
from cotenant.v1 import predictor_service_pb2 as pb


def profile_of(
    kind: JobClass, seen_seconds: float, profile_store: ProfileStore, chain: Chain, failed: Failed
) -> pb.Profile:
    """Return the profile of a job class; this fits a curve per setting, which takes milliseconds."""
    user, model, name, gpu_milli, replicas = kind
    profile = pb.Profile(user=user, model=model, name=name, gpu_milli=gpu_milli, replicas=replicas)
    if math.isfinite(seen_seconds):
        profile.seen_time.CopyFrom(timestamp(seen_seconds))
    for setting, known in sorted(profile_store.settings(kind).items()):
        points = known.windows.points()
        if points:
            written = profile.settings.add(gpu_type=setting.gpu_type, phase=setting.phase, nodes=setting.nodes)
            written.stale = known.stale
            _write_curve(core_curve.fit(points), written)
    query = Query(user, model, name, gpu_milli, replicas)
    for predictor in chain.predictors.values():
        estimate = Chain([predictor], failed).estimate(query)
        EstimateWriter().write([estimate], [pb.EstimateQuery()], [profile.estimates.add()])
    return profile


def _write_curve(curve: core_curve.Curve, setting: pb.ProfileSetting) -> None:
    for point in curve.points:
        setting.rates.add(
            cores=point.cores, rate_per_second=point.rate, windows=point.windows, relative_spread=point.spread
        )
    setting.levels_off = curve.levels_off
    if curve.levels_off and len(curve.points) > 1:
        setting.cores_useful = curve.cores_useful
        setting.cores_useful_min, setting.cores_useful_max = curve.interval
        setting.cores_useful_confidence = curve.theta_confidence
