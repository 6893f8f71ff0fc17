"""holdfast serve under a launcher: only rank 0 takes the port, which the ranks of its node would take too."""

import pytest

from error_codes import raises_code
from holdfast.cli import serve as command
from holdfast.cli.serve import ServeOptions, serve
from holdfast.errors import ConfigError
from holdfast.server import run

LAUNCHED = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TYPED = ServeOptions(
    *(None, "127.0.0.1", "0", None, None, None, None, None),
    *(False, "100", "5", False, "text", "auto", "auto", None, None),
)
OPTIONS = {"device": "cpu", "tensor_parallel_size": 2}


class Bound(Exception):
    """The port was requested."""


@pytest.fixture
def steps(monkeypatch) -> None:
    def bind(host: str, port: int) -> None:
        raise Bound

    def become_a_rank(config: object, report: object) -> None:
        raise SystemExit(0)

    for name in ("HOLDFAST_API_KEY", "HOLDFAST_API_KEYS", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "bind_socket", bind)
    monkeypatch.setattr(command, "open_visibly", become_a_rank)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("rank", "ending"), [("0", Bound), ("1", SystemExit)])
def test_serve_port_is_taken_by_rank_0_alone(rank: str, ending: type[BaseException], monkeypatch) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ending):
        serve(TYPED, {**OPTIONS, "core_process": False})


@pytest.mark.usefixtures("steps")
def test_serve_rank_with_core_process_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with raises_code("rank.launcher_core_process", ConfigError):
        serve(TYPED, OPTIONS)
