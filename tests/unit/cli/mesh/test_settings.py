"""Settings and profiles: what a user names comes first, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.cli.mesh.settings import Settings, agent_settings, read_settings, with_profile
from cotenant.cli.outcome import CommandError
from cotenant.core.policy.profiles import DEFAULT, GROUPS, find
from cotenant.simulator.scenario import Scenario


def chosen(settings: Settings) -> dict[str, str]:
    return {group: getattr(settings, group) for group in GROUPS}


def test_a_mesh_runs_the_default_profile_unless_it_is_told_otherwise() -> None:
    assert chosen(with_profile(Settings())) == find(DEFAULT).names()


def test_a_file_chooses_a_profile_and_replaces_a_policy_of_it(tmp_path: Path) -> None:
    path = tmp_path / "cotenant.toml"
    path.write_text('profile = "plain"\nqueue = "las"\n[options.queue]\npromote_knob = 2\n')
    settings = with_profile(read_settings(path))
    assert chosen(settings) == {**find("plain").names(), "queue": "las"}
    assert settings.options == {"queue": {"promote_knob": "2"}}, "the options of fifo are not those of las"


def test_fifo_lets_jobs_pass_a_gang_that_does_not_fit_whatever_the_profile() -> None:
    for profile in ("full", "plain"):
        assert (with_profile(Settings(profile=profile, queue="fifo")).options or {})["queue"] == {"mode": "backfill"}


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(CommandError, match="did you mean plain"):
        with_profile(Settings(profile="plane"))


@pytest.mark.parametrize(
    ("speed", "contention"), [("", "none"), ("cores", "none"), ("cores,bandwidth", "coda-eliminator")]
)
def test_a_simulation_relieves_contention_only_where_jobs_contend(speed: str, contention: str) -> None:
    options = {"simulator": {"speed": speed}} if speed else {}
    scenario = Scenario("sample", "2x8", options=options).under(find("full"))
    assert {group: getattr(scenario, group) for group in GROUPS} == {**find("full").names(), "contention": contention}
    assert scenario.options.get("simulator") == options.get("simulator")


def test_the_runtime_of_agents_is_chosen_by_name(tmp_path: Path) -> None:
    assert agent_settings(Settings())["runtime"] == "process"
    (tmp_path / "settings.toml").write_text('runtime = "proces"')
    with pytest.raises(CommandError, match=r"there is no runtime 'proces'; did you mean process\?"):
        agent_settings(read_settings(tmp_path / "settings.toml"))
