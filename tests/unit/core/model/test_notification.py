"""Targets of notifications: which are valid, what of them is shown, and which addresses may be reached."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.notification import (
    ENDS,
    TARGET_LENGTH_MAX,
    TARGETS_MAX,
    Trigger,
    due,
    end_of,
    host_of,
    is_allowed,
    redacted,
    retry_seconds,
    target_error,
)
from cotenant.core.model.validation import check_spec

SECRET = "s3cret"


@pytest.mark.parametrize(
    "target",
    [
        "https://hooks.example.org/T0/s3cret?token=x",
        "http://10.0.0.1:8080/",
        "https://[2001:db8::1]:8443/x",
        "HTTPS://Example.org",
        "mailto:ada.lovelace+jobs@example.org",
        "https://example.org/".ljust(TARGET_LENGTH_MAX, "x"),
    ],
)
def test_a_valid_target_is_accepted(target: str) -> None:
    assert target_error(target) == ""


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("", "must begin with"),
        ("ftp://example.org/s3cret", "must begin with"),
        ("file:///s3cret", "must begin with"),
        ("https://ada:s3cret@example.org/", "no user name or password"),
        ("https://s3cret@example.org/", "no user name or password"),
        ("https:///s3cret", "no valid host"),
        ("https://-bad-.org/s3cret", "no valid host"),
        ("https://example.org:99999/s3cret", "invalid host or port"),
        ("https://example.org:0/s3cret", "port"),
        ("https://[::s3cret]/", "invalid host or port"),
        ("https://example.org/#s3cret", "fragment"),
        ("https://example.org/s3cret\r\nX: y", "printable ASCII"),
        ("https://example.org/s3 cret", "printable ASCII"),
        ("https://exämple.org/s3cret", "printable ASCII"),
        ("https://example.org/" + "s3cret" * 400, "characters; 2048 are allowed"),
        ("https://example.org/".ljust(TARGET_LENGTH_MAX + 1, "x"), "has 2049 characters; 2048 are allowed"),
        ("https://example.org/…", "is redacted"),
        ("mailto:ada", "needs one address"),
        ("mailto:ada@example.org?bcc=s3cret@x.org", "needs one address"),
        ("mailto:ada@x.org,s3cret@y.org", "needs one address"),
    ],
)
def test_an_invalid_target_is_refused_without_its_secret(target: str, why: str) -> None:
    assert why in target_error(target)
    assert SECRET not in target_error(target)


@given(st.text(), st.sampled_from(["", "https://", "http://", "mailto:", "https://example.org/"]))
def test_no_target_breaks_the_validation(text: str, start: str) -> None:
    target = start + text
    if not target_error(target):
        assert host_of(redacted(target)) == host_of(target)


def test_only_scheme_and_host_are_shown() -> None:
    assert redacted("https://example.org:8443/s3cret?key=s3cret") == "https://example.org:8443/…"
    assert redacted("mailto:ada@example.org") == "mailto:…@example.org"


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        *[
            (internal, False)
            for internal in (
                "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "224.0.0.1",
                "239.1.1.1", "100.64.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "ff02::1",
                "::ffff:10.0.0.1", "2002:7f00:1::",
            )
        ],
    ],
)  # fmt: skip
def test_internal_addresses_are_refused(address: str, allowed: bool) -> None:
    assert is_allowed(ip_address(address), ()) is allowed
    assert is_allowed(ip_address(address), [ip_network("0.0.0.0/0"), ip_network("::/0")])


def test_every_bad_target_of_a_job_is_named() -> None:
    job = JobSpec(roles=(Role(),), command=("true",), notify=("ftp://x", "mailto:a@b.org", "mailto:a@b.org"))
    assert [one.field for one in check_spec(job) if "notify" in one.field] == ["spec.notify[0]", "spec.notify[2]"]
    many = JobSpec(roles=(Role(),), command=("true",), notify=("mailto:a@b.org",) * (TARGETS_MAX + 1))
    assert "at most 4 are allowed" in str(check_spec(many))


@given(
    st.sets(st.sampled_from(Trigger)),
    st.sets(st.sampled_from(Trigger)),
    st.integers(0, TARGETS_MAX),
    st.sets(st.sampled_from(["failed/0", "started/1"])),
)
def test_what_is_due_has_happened_is_wanted_and_not_done(
    wanted: set[Trigger], happened: set[Trigger], targets: int, done: set[str]
) -> None:
    found = {one.key for one in due(["mailto:a@b.org"] * targets, wanted, dict.fromkeys(happened, 1.0), done)}
    expected = {f"{one}/{index}" for one in happened & (wanted or set(ENDS)) for index in range(targets)}
    assert found == expected - done


def test_an_array_has_failed_if_one_of_its_jobs_has() -> None:
    assert end_of({Phase.SUCCEEDED: 9_999, Phase.CANCELLED: 3, Phase.FAILED: 1}) is Trigger.FAILED
    assert end_of({Phase.SUCCEEDED: 9_999, Phase.CANCELLED: 1}) is Trigger.CANCELLED
    assert end_of({Phase.SUCCEEDED: 10_000}) is Trigger.SUCCEEDED


def test_retries_back_off_and_spread() -> None:
    waits = [retry_seconds(tries, 1.0) for tries in range(1, 12)]
    assert waits == sorted(waits)
    assert waits[-1] == retry_seconds(10**9, 1.0) == 900.0
    assert all(wait / 2 == retry_seconds(tries, 0.0) for tries, wait in enumerate(waits, 1))
