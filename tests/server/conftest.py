"""One server for all tests of endpoints that need a port, and one app for those that do not."""

from collections.abc import Iterator

import httpx
import pytest

from server.served import Served, app_client, served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture(scope="session")
def client() -> Iterator[httpx.Client]:
    with app_client() as session:
        yield session
