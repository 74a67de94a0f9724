from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def warnings_only() -> Iterator[None]:
    """Log warnings only: hundreds of jobs would log thousands of lines."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    yield
    structlog.reset_defaults()
