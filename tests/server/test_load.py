"""A real server under load: many streams at once, clients that go away; nothing is lost, kept or grown. Long ones are slow."""

from collections.abc import Iterator

import pytest

from holdfast.cli.bench_load import Figures
from server.loaded import LEFT, Loaded, Slope, file_limit, loaded, requests, run_load, slope

MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    with loaded(tmp_path_factory.mktemp("load")) as running:
        yield running


def check_finished(server: Loaded, num_clients: int, number: int, num_output: int) -> Figures:
    """Everybody gets all tokens."""
    replies = run_load(server, requests(number, (num_output, num_output), seed=number), num_clients)
    figures = Figures.of(replies, 0.0)
    assert figures.errors == {}, figures.examples
    assert figures.num_finished == number
    assert {reply.num_output_tokens for reply in replies} == {num_output}
    assert {reply.finish_reason for reply in replies} == {"length"}
    server.at_rest()
    return figures


def check_soak(server: Loaded, number: int, num_clients: int, abort_share: float) -> int:
    """Clients that stay get their answers, those that go leave nothing; how many went."""
    replies = run_load(server, requests(number, (1, 8), seed=number), num_clients, abort_share)
    errors = Figures.of(replies, 0.0).errors
    assert set(errors) <= {LEFT}, errors
    assert len(replies) == number
    return errors.get(LEFT, 0)


def test_server_streams_50_clients(server: Loaded) -> None:
    check_finished(server, num_clients=50, number=50, num_output=8)


def test_server_300_requests_with_aborts_leave_nothing(server: Loaded) -> None:
    before = server.ledger()
    check_soak(server, 60, 16, 0.1)
    resident = server.resident_bytes()
    assert 10 < check_soak(server, 300, 16, 0.1) < 60
    server.at_rest()
    assert server.ledger() == before
    grown = {name: value - resident[name] for name, value in server.resident_bytes().items()}
    assert all(value < 16 * MIB for value in grown.values()), grown


def test_slope_separates_growth_from_noise() -> None:
    assert slope([5, 7, 5, 6, 5, 7, 6, 5]).includes_zero
    assert slope([9, 9, 9, 8, 8]).includes_zero
    assert not slope([1, 2, 3.2, 4, 5, 6.1, 7]).includes_zero
    assert Slope(1.0, 1.5).includes_zero


@pytest.mark.slow
def test_server_streams_1000_clients_without_growth(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All finish, and later rounds hold no more than the first ones did."""
    file_limit(1000)
    with loaded(tmp_path_factory.mktemp("thousand")) as server:
        seen: list[dict[str, int]] = []
        for _ in range(6):
            check_finished(server, num_clients=1000, number=1000, num_output=16)
            seen.append(server.resident_bytes())
        print("resident MiB by round:", [{name: round(value / MIB, 1) for name, value in one.items()} for one in seen])
        for name in seen[0]:
            warm = [one[name] for one in seen[2:]]
            assert max(warm) - min(warm) < 8 * MIB, (name, warm)


@pytest.mark.slow
def test_server_20000_requests_with_aborts_leave_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Resident memory does not grow, pages are all free, the ledger is as it was.

    In the rounds before the first look there are four times as many clients: what a crowd needs at once stays with the process,
    and the largest one among equals would come late.
    """
    with loaded(tmp_path_factory.mktemp("soak")) as server:
        before = server.ledger()
        looks: list[dict[str, int]] = []
        num_left = 0
        for number in range(40):
            num_left += check_soak(server, 500, 128 if number < 10 else 32, 0.1)
            server.at_rest()
            looks.append(server.resident_bytes())
        warm = {name: [float(one[name]) for one in looks[10:]] for name in looks[0]}
        for name, values in warm.items():
            print(name, "MiB:", [round(value / MIB, 2) for value in values], "bytes per 500 requests:", slope(values))
        print("clients that left:", num_left)
        assert 1600 < num_left < 2400
        assert server.ledger() == before
        assert all(slope(values).includes_zero for values in warm.values())
