"""Profiles of job classes as text and for `--json`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from cotenant.cli import units, views
from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.estimate_view import estimate_view, percent, remaining
from cotenant.cli.render import Column
from cotenant.cli.research.predicting.fitting import figure, span
from cotenant.cli.views import View
from cotenant.codec.specs import seconds
from cotenant.core.model.refusal import gpus, plural
from cotenant.v1.predictor_service_pb2 import ListProfilesRequest, ListProfilesResponse, Profile, ProfileSetting

PAGE_SIZE = 100
COLUMNS = (
    Column("MODEL", elastic=True),
    Column("USER", elastic=True),
    Column("GPUS", right=True),
    Column("REPLICAS", right=True),
    Column("CORES MEASURED", right=True),
    Column("Θ", right=True),
    Column("RUN TIME", right=True),
    Column("STALE"),
    Column("SEEN", right=True),
)


async def profiles(mesh: Mesh, model: str, user: str) -> AsyncIterator[Profile]:
    """Yield all profiles of a model or a user, page by page."""
    token = ""
    while True:
        request = ListProfilesRequest(model=model, user=user, page_size=PAGE_SIZE, page_token=token)
        page: ListProfilesResponse = await mesh.predictor.ListProfiles(request)
        for profile in page.profiles:
            yield profile
        token = page.next_page_token
        if not token:
            return


def profile_view(profile: Profile, now: float) -> View:
    """Return the profile of a job class."""
    return {
        "user": profile.user,
        "model": profile.model or None,
        "name": profile.name,
        "gpus": views.gpus(profile.gpu_milli),
        "replicas": profile.replicas,
        "seen_time": views.time_of(profile, "seen_time"),
        "seen_seconds": max(0.0, now - seconds(profile.seen_time)) if profile.HasField("seen_time") else None,
        "settings": [_setting_view(setting) for setting in profile.settings],
        "estimates": [estimate_view(estimate) for estimate in profile.estimates],
    }


def _setting_view(setting: ProfileSetting) -> View:
    known = setting.cores_useful > 0
    return {
        "gpu_type": setting.gpu_type or None,
        "phase": setting.phase or None,
        "nodes": setting.nodes,
        "stale": setting.stale or None,
        "levels_off": setting.levels_off,
        "theta": {
            "cores": setting.cores_useful,
            "low": setting.cores_useful_min,
            "high": setting.cores_useful_max,
            "confidence": setting.cores_useful_confidence,
        }
        if known
        else None,
        "rates": [
            {
                "cores": rate.cores,
                "rate_per_second": rate.rate_per_second,
                "windows": rate.windows,
                "relative_spread": rate.relative_spread,
            }
            for rate in setting.rates
        ],
    }


def row(view: View) -> Sequence[str]:
    """Return a job class's row; θ is that of training, on the GPU type measured at the most core counts."""
    training = [one for one in view["settings"] if not one["phase"]] or view["settings"]
    main = max(training, key=lambda one: len(one["rates"]), default=None)
    counts = sorted({rate["cores"] for one in view["settings"] for rate in one["rates"]})
    runs = next((remaining(one) for one in view["estimates"] if one["predictable"]), "")
    return [
        view["model"] or view["name"],
        view["user"],
        f"{view['gpus']:g}",
        str(view["replicas"]),
        ",".join(map(str, counts)),
        str(main["theta"]["cores"]) if main and main["theta"] else "",
        runs,
        "stale" if any(one["stale"] for one in view["settings"]) else "",
        "" if view["seen_seconds"] is None else f"{units.short_seconds(view['seen_seconds'])} ago",
    ]


def card(view: View) -> Iterator[tuple[str, str]]:
    """Yield the profile of a job class as text."""
    yield "model", view["model"] or ""
    yield "name", "" if view["model"] else view["name"]
    yield "user", view["user"]
    yield "shape", f"{plural(view['replicas'], 'replica')}, {gpus(round(1000 * view['gpus']))} in all"
    if view["seen_seconds"] is not None:
        yield "last seen", f"{units.short_seconds(view['seen_seconds'])} ago"
    for setting in view["settings"]:
        yield from _setting_card(setting)
    for estimate in view["estimates"]:
        predictor, _, said = estimate["source"].partition(": ")
        if estimate["predictable"]:
            said = f"{remaining(estimate)}, confidence {percent(estimate['confidence'])}: {said}"
        yield predictor, said


def _setting_card(setting: View) -> Iterator[tuple[str, str]]:
    where = [setting["gpu_type"] or "", setting["phase"] or ""]
    where += [plural(setting["nodes"], "node")] if setting["nodes"] > 1 else []
    what = ", ".join(part for part in where if part)
    rates = [f"{figure(rate['rate_per_second'])} on {rate['cores']} (×{rate['windows']})" for rate in setting["rates"]]
    yield f"rates {what}".strip(), f"{', '.join(rates)} steps per second by cores (windows)"
    if theta := setting["theta"]:
        sure = f"{span(theta['low'], theta['high'])} at 90 %, confidence {percent(theta['confidence'])}"
        yield f"θ {what}".strip(), f"{plural(theta['cores'], 'core')} ({sure})"
    else:
        yield f"θ {what}".strip(), "unknown" if setting["levels_off"] else "unknown: the rate has not leveled off"
    yield f"stale {what}".strip(), setting["stale"] or ""
