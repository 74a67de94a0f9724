"""Profiles: every one can be loaded, and what a user names comes before it."""

from __future__ import annotations

import pytest

from cotenant import plugins
from cotenant.core.policy import profiles
from cotenant.core.policy.options import options_by_policy, split_names
from cotenant.core.policy.profiles import DEFAULT, GROUPS, PROFILES, Profile, UnknownProfile, find
from cotenant.plugins import POLICY_GROUPS as PLUGIN_GROUPS


@pytest.mark.parametrize("name", PROFILES)
def test_every_policy_of_a_profile_is_installed_and_takes_its_options(name: str) -> None:
    profile = find(name)
    for group, policy in profile.names().items():
        names = split_names(policy)
        options = options_by_policy(names, profile.options.get(group, {}))
        for each in names:
            assert plugins.load(PLUGIN_GROUPS[group], each, options.get(each, {})).name == each


def test_a_profile_with_a_missing_plug_in_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Profile("odd", "Names a policy that is not installed.", queue="fifoo")
    monkeypatch.setattr(profiles, "PROFILES", {**PROFILES, "odd": odd})
    with pytest.raises(plugins.UnknownPolicy, match="there is no queue policy 'fifoo'; did you mean fifo") as refused:
        plugins.load(PLUGIN_GROUPS["queue"], find("odd").queue)
    assert refused.value.near[0] == "fifo"


def test_the_default_has_a_part_of_every_paper() -> None:
    full = find(DEFAULT)
    assert {"loss-curve", "latency", "history"} <= set(split_names(full.predictor))
    assert (full.allocator, full.contention) == ("coda-adaptive", "coda-eliminator")
    assert tuple(full.names()) == GROUPS


def test_a_named_policy_replaces_that_of_the_profile_with_its_options() -> None:
    plain = find("plain")
    assert plain.names({"queue": "las", "placement": ""})["queue"] == "las"
    assert plain.names({"queue": "las", "placement": ""})["placement"] == plain.placement
    assert plain.options_with({"queue": "las"}) == {}
    assert plain.options_with() == {"queue": {"mode": "backfill"}}


def test_an_unknown_profile_is_refused_with_similar_names() -> None:
    with pytest.raises(UnknownProfile, match=r"no profile 'papr:coda'; did you mean paper:coda or "):
        find("papr:coda")
