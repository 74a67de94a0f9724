from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def warnings_only() -> Iterator[None]:
    """Hundreds of jobs would say thousands of times that all is well."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    yield
    structlog.reset_defaults()
