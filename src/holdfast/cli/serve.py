"""`holdfast serve`: check port, keys and limits, open the model, serve it until a signal; no torch."""

import ipaddress
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from holdfast.cli.opened_model import OpenedModel, model_name, open_visibly, refuse_bare_ids, report_file
from holdfast.cli.options import Given, read_choice, read_seconds, read_whole
from holdfast.cli.start_line import StartLine
from holdfast.cli.terminal import write_line
from holdfast.config import EngineConfig
from holdfast.engine.launched import find_launcher
from holdfast.errors import ConfigError, RequestError, shown
from holdfast.memory.sizes import parse_bytes
from holdfast.request.vllm_names import PARSERS_OF_VLLM

if TYPE_CHECKING:
    from holdfast.server.keys import Keys
    from holdfast.server.service import ServerLimits, Service

NEEDED = ("fastapi", "uvicorn", "httptools", "pydantic", "prometheus_client")
"""Libraries of the server; the engine does not need them."""
MAX_NAME_CHARS = 256
MAX_DRAIN_SECONDS = 3600.0
MAX_CONNECTIONS = 2**20


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options as text."""

    model: str | None
    host: str
    port: str
    api_key: list[str] | None
    api_key_file: str | None
    served_model_name: list[str] | None
    allow_origin: list[str] | None
    allowed_host: list[str] | None
    allow_public: bool
    max_connections: str
    drain_seconds: str
    log_requests: bool
    log_format: str
    tool_parser: str
    reasoning_parser: str
    config: str | None
    memory_report: str | None
    response_memory: str = "64MiB"


def serve(options: ServeOptions, engine_options: Given, start: StartLine | None = None) -> None:
    """Serve a model until a signal. All options are checked before a weight is read."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError("cli.server_not_installed", names=missing)
    from holdfast.server.app import make_app
    from holdfast.server.keys import collect_keys
    from holdfast.server.logs import RequestLog
    from holdfast.server.run import WaitingDoor, address_of, bind_socket, raise_file_limit, run_server
    from holdfast.server.traces import open_traces

    config = EngineConfig.from_options(model=options.model, **{"core_process": True, **engine_options}).paced()
    refuse_bare_ids(config)
    launched = find_launcher(config)
    if launched is not None and launched.rank > 0:
        open_visibly(config, None)  # does not return: rank 0 serves
    report = report_file(options.memory_report)
    limits, port = read_limits(options), read_whole(options.port, "--port", 0, 65535)
    keys = collect_keys(options.api_key or (), options.api_key_file)
    refuse_open_door(options, keys)
    names = read_names(options.served_model_name)
    origins = read_origins(options.allow_origin or ())
    hosts = (*(options.allowed_host or ()), options.host)
    log_format = read_choice("--log-format", options.log_format, ("text", "json"))
    options = check_parsers(options)
    traces = open_traces((names or (model_name(config),))[0])
    with bind_socket(options.host, port) as listener:
        started = time.monotonic()
        note = raise_file_limit(limits.max_connections)
        if note is not None:
            write_line(f"note: {note}")
        if options.api_key:
            write_line("note: other users of this machine see --api-key; HOLDFAST_API_KEY and --api-key-file hide it")
        with WaitingDoor(listener):
            opened = open_visibly(config, report, start)
        service = _service(opened, options, names, limits)
        log = RequestLog("json" if log_format == "json" else "text", wants_text=options.log_requests)
        app = make_app(service, keys, allowed_hosts=hosts, allowed_origins=origins, log=log, traces=traces)
        ready = f"{service.name} is ready at {address_of(listener)} after {time.monotonic() - started:.1f} s"
        try:
            run_server(app, service, listener, lambda: write_line(f"{ready} ({_access(keys)})"), owns_process=True)
        finally:
            if traces is not None:
                traces.close()


def _service(opened: OpenedModel, options: ServeOptions, names: tuple[str, ...], limits: "ServerLimits") -> "Service":
    from holdfast.api.async_llm import AsyncLLM
    from holdfast.server.service import DEFAULT_MODEL_ADVICE, Service

    return Service(
        AsyncLLM.from_engine(opened.engine),
        names or (opened.name.removesuffix(".gguf"),),
        limits,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        advice=DEFAULT_MODEL_ADVICE if options.model is None else {},
    )


def _access(keys: "Keys") -> str:
    if not len(keys):
        return "without a key"
    return "with a key" if len(keys) == 1 else f"with one of {len(keys)} keys"


def refuse_open_door(options: ServeOptions, keys: "Keys") -> None:
    """Refuse a public address without an API key, since every client could use the machine."""
    if is_loopback(options.host) or len(keys) or options.allow_public:
        return
    raise ConfigError("cli.public_without_key", host=options.host)


def is_loopback(host: str) -> bool:
    """Return True if every address of a host is a loopback address."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def check_parsers(options: ServeOptions) -> ServeOptions:
    """Refuse an unknown parser; replace vLLM's other parsers by auto."""
    from holdfast.text.reasoning import choose_reasoning_parser
    from holdfast.text.tool_formats import choose_tool_parser

    for option, choose, name in (
        ("tool_parser", choose_tool_parser, options.tool_parser),
        ("reasoning_parser", choose_reasoning_parser, options.reasoning_parser),
    ):
        try:
            choose(None, name)
        except RequestError as error:
            typed = f"--{option.replace('_', '-')} {shown(name)}"
            if name not in PARSERS_OF_VLLM:
                raise ConfigError(
                    "cli.unknown_parser", typed=typed, accepted=error.values.get("accepted", ())
                ) from error
            write_line(f"note: ignored: {typed} (the chat template decides the format)")
            options = replace(options, **{option: "auto"})
    return options


def read_limits(options: ServeOptions) -> "ServerLimits":
    """Read the limits of the server."""
    from holdfast.server.service import ServerLimits

    connections = read_whole(options.max_connections, "--max-connections", 1, MAX_CONNECTIONS)
    seconds = read_seconds(options.drain_seconds, "--drain-seconds", MAX_DRAIN_SECONDS)
    kept_bytes = 0 if options.response_memory == "0" else parse_bytes(options.response_memory, "--response-memory")
    return ServerLimits(max_connections=connections, drain_seconds=seconds, max_response_bytes=kept_bytes)


def read_names(given: Iterable[str] | None) -> tuple[str, ...]:
    """Read the model's names; answers have the first."""
    names = [part.strip() for text in given or () for part in text.split(",")]
    for name in names:
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise ConfigError("cli.bad_model_name", value=name, maximum=MAX_NAME_CHARS)
    return tuple(dict.fromkeys(names))


def read_origins(given: Iterable[str]) -> tuple[str, ...]:
    """Read the origins of web pages: https://example.com, or * for all."""
    origins = [part.strip().rstrip("/") for text in given for part in text.split(",")]
    for origin in origins:
        scheme, _, rest = origin.partition("://")
        if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest or not rest.isprintable()):
            raise ConfigError("cli.bad_origin", value=origin)
    return tuple(origins)
