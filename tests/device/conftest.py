"""Open devices for the tests of their contract; which ones there are is in factories.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device.factories import EVERY, WITH_BYTES, Factory, Rig, opened


@pytest.fixture(params=EVERY)
def any_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Every device, also one that only keeps books."""
    factory: Factory = request.param
    with opened(factory) as rig:
        yield rig


@pytest.fixture(params=WITH_BYTES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Every device that has memory behind its addresses."""
    factory: Factory = request.param
    with opened(factory) as rig:
        yield rig
