"""How the commands of the façade fail: Slurm's messages, each line with the name of the command."""

from __future__ import annotations

import sys

from cotenant.cli.outcome import CommandError, ExitCode, sanitize

FAILED = 1  # Slurm's commands exit with 1 for every kind of failure


class SlurmError(Exception):
    """A failure with the lines that Slurm would print; `prefixed` lines get the name of the command."""

    def __init__(self, *lines: str, prefixed: bool = True, code: int = FAILED) -> None:
        super().__init__("; ".join(lines))
        self.lines, self.prefixed, self.code = lines, prefixed, code


def warn(command: str, text: str) -> None:
    """Print a warning on stderr."""
    print(f"{command}: warning: {sanitize(text)}", file=sys.stderr)


def show(command: str, error: SlurmError) -> None:
    """Print a failure on stderr."""
    for line in error.lines:
        print(f"{command}: error: {sanitize(line)}" if error.prefixed else sanitize(line), file=sys.stderr)


def of_mesh(error: CommandError, failed: str) -> SlurmError:
    """Return the failure of a call: what failed in Slurm's words, why in Cotenant's."""
    if error.code == ExitCode.UNREACHABLE:
        return SlurmError(f"{failed}Unable to contact slurm controller (connect failure)", error.message)
    hint = [f"hint: {error.hint}"] if error.hint else []
    return SlurmError(f"{failed}{_slurm_reason(error.message, error.details)}", *error.details, *hint)


OF_ANOTHER = "a tenant-admin of its tenant may change it"  # how the queue refuses to change a job of somebody else
_REASONS = (
    ("spec.tenant", "Invalid account or account/partition combination specified"),
    ("PERMISSION", "Access/permission denied"),
    (OF_ANOTHER, "Access/permission denied"),
    ("spec.array", "Invalid job array specification"),
    ("spec.dependencies", "Job dependency problem"),
    ("spec.time_limit", "Requested time limit is invalid (missing or exceeds some limit)"),
    ("NEVER_FITS", "Requested node configuration is not available"),
)


def _slurm_reason(message: str, details: tuple[str, ...]) -> str:
    whole = " ".join([message, *details])
    found = next((text for word, text in _REASONS if word in whole), "")
    return f"{found}: {message}" if found else message
