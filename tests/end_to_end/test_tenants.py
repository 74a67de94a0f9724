"""Tenants from the command line, against a real mesh."""

from __future__ import annotations

import sys

from tests.end_to_end.commands import Cli


def test_a_tenant_is_created_updated_and_deleted(cli: Cli) -> None:
    made = cli.json("tenants", "create", "vision", "--quota-gpus", "1", "--limit-gpus", "1.5")
    assert (made["quota_gpus"], made["limit_gpus"], made["quota_cores"], made["weight"]) == (1, 1.5, None, 1.0)
    assert cli("tenants", "create", "vision", "--quota-gpus", "1", "--limit-gpus", "1.5").code == 0
    changed = cli.json("tenants", "update", "vision", "--limit-gpus", "none", "--weight", "2.5")
    assert (changed["quota_gpus"], changed["limit_gpus"], changed["weight"]) == (1, None, 2.5)
    assert "vision" in [tenant["id"] for tenant in cli.json("tenants")]
    assert "vision" in cli("tenants").out
    cli("tenants", "delete", "vision")
    assert "vision" not in [tenant["id"] for tenant in cli.json("tenants")]


def test_all_mistakes_in_a_tenant_are_reported_at_once(cli: Cli) -> None:
    refused = cli("tenants", "create", "vision", "--quota-gpus", "many", "--limit-cores", "1.5", code=2)
    assert "--quota-gpus" in refused.err
    assert "--limit-cores" in refused.err
    over = cli("tenants", "create", "Vision", "--quota-gpus", "2", "--limit-gpus", "1", code=2)
    assert "tenant.id" in over.err
    assert "tenant.quota_gpu_milli" in over.err
    assert cli("tenants", "update", "vision", code=2).error
    assert cli("tenants", "delete", "nobody", code=2).error


def test_a_job_over_its_tenants_limit_is_explained_and_a_priority_has_a_name(cli: Cli) -> None:
    cli("tenants", "create", "small", "--limit-gpus", "0")
    sleep = ("--", sys.executable, "-c", "import time; time.sleep(60)")
    job = cli("submit", "--tenant", "small", "--gpus", "1", "--cpus", "1", "--priority", "high", *sleep).out.split()[0]
    try:
        assert "high" in cli("show", job).out
        reported = cli.json("explain", job)
        assert reported["job"]["priority"] == 100
        assert cli.json("update", job, "--priority", "low")[0]["priority_class"] == "low"
    finally:
        cli("cancel", job)
    cli("tenants", "delete", "small")


def test_groups_are_listed_below_their_department(cli: Cli) -> None:
    cli("tenants", "create", "zoo", "--limit-gpus", "1")
    assert cli.json("tenants", "create", "ape", "--parent", "zoo")["parent"] == "zoo"
    names = [line.split("  ")[0] or line[:5] for line in cli("tenants").out.splitlines()]
    assert names.index("zoo") + 1 == names.index("  ape")
    assert "is the parent of" in cli("tenants", "delete", "zoo", code=1).err
    assert cli.json("tenants", "update", "ape", "--parent", "none")["parent"] is None
    for tenant in ("ape", "zoo"):
        cli("tenants", "delete", tenant)


def test_usage_is_listed_by_tenant_and_by_user(cli: Cli) -> None:
    burn = ("--", sys.executable, "-c", "import time; time.sleep(0.5)")
    cli("submit", "--tenant", "used", "--gpus", "1", "--cpus", "1", "--wait", *burn)
    (row,) = [one for one in cli.json("tenants", "--usage", "--users") if one["tenant"] == "used"]
    assert row["gpu_hours"] > 0.4 / 3600
    assert row["core_hours"] > 0.4 / 3600
    assert 0 < row["usage_share"] <= 1
    assert 0 < row["fair_share"] <= 1
    assert (row["share"], row["weight"], row["half_life_seconds"]) == (0, 1, 604_800)
    (user,) = row["users"]
    assert user["gpu_hours"] == row["gpu_hours"]
    table = cli("tenants", "--usage", "--users").out
    assert "GPU-HOURS" in table
    assert f"  {user['user']}" in table
    assert "half-life 7d" in table
    assert user["user"] not in cli("tenants", "--usage").out
    assert "--users needs --usage" in cli("tenants", "--users", code=2).err
