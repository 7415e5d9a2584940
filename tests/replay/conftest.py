"""Here everything is checked after every mutation."""

from collections.abc import Iterator

import pytest
from checked import checked


@pytest.fixture(autouse=True)
def everything_is_checked() -> Iterator[None]:
    """Ring, samplers, sum tree, limiter and staging: `check_valid()` after each change."""
    with checked():
        yield
