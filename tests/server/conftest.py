"""One server for all tests of endpoints that need a port, and one app for those that do not."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import httpx

    from server.served import Served


@pytest.fixture(scope="session")
def server() -> Iterator["Served"]:
    from server.served import served  # here, since a machine may lack what it needs

    with served() as running:
        yield running


@pytest.fixture(scope="session")
def client() -> Iterator["httpx.Client"]:
    from server.served import app_client

    with app_client() as session:
        yield session
