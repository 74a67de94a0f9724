"""The options of pytest for the laws; they exist only in a run that names `cotenant.conformance`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cotenant import extras

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE = "cotenant.conformance"
pytest.register_assert_rewrite(f"{PACKAGE}.placement_streams")  # it asserts for the laws


class Options:
    """The options, which no other run of pytest has: other plug-ins may use the same names."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        """Add them."""
        from cotenant import plugins  # here, because this module is imported by every run of pytest

        group = parser.getgroup(PACKAGE, "the laws of Cotenant's policies")
        group.addoption(
            "--policy", action="append", default=[], metavar="NAME", help="Hold this policy to the laws; repeatable."
        )
        group.addoption(
            "--group",
            choices=[*plugins.SHORT_GROUPS],
            default="",
            help="Of this group only, if several have the name.",
        )

    def pytest_configure(self, config: pytest.Config) -> None:
        """Find the policies before anything is collected.

        Raises:
            pytest.UsageError: names every policy that cannot be held to laws.
        """
        from cotenant.conformance.selection import selection_of  # here, for the same reason

        selection_of(config)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: Sequence[str]) -> None:
    """Add the options to a run of the laws.

    Raises:
        pytest.UsageError: what they need is not installed.
    """
    if not any(word.partition("::")[0].startswith(PACKAGE) for word in args):
        return
    if lacking := extras.missing(["conformance"]):
        raise pytest.UsageError(
            f"{PACKAGE} needs the extra conformance; missing: {', '.join(lacking)}; "
            f"{extras.how_to_install('conformance')}"
        )
    early_config.pluginmanager.register(Options(), PACKAGE)
