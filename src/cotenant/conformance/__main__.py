"""`python -m cotenant.conformance --policy NAME`: holds policies to the laws, or says what to install for that."""

from __future__ import annotations

import sys

from cotenant import extras


def main(arguments: list[str]) -> int:
    """Run the laws with these arguments for pytest; return its exit code, or 2 if there is no pytest."""
    if lacking := extras.missing(["conformance"]):
        print(f"error: missing: {', '.join(lacking)}", file=sys.stderr)
        print(f"hint: {extras.how_to_install('conformance')}", file=sys.stderr)
        return 2
    import pytest

    return int(pytest.main(["--pyargs", "cotenant.conformance", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
