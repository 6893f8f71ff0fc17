"""run_server: serve from a bound port to an exit code: readiness, engine watchdog, drain, shutdown; no torch.

bind_socket     before a model is opened, so that a port in use is reported at once
WaitingDoor     answers 503 while the model opens
run_server      until a signal or the engine's death:
    SIGTERM, SIGINT   drain: new requests get 503, running ones finish; after drain_seconds the rest ends with an error;
                      half-open connections end at once; a second signal ends everything; exit code 0
    engine dead       its requests have failed already; EngineDeadError, so that a supervisor restarts the server
"""

import asyncio
import contextlib
import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from holdfast.engine.garbage import IdleCollector, keep_start
from holdfast.errors import ConfigError, EngineDeadError, HoldfastError, shown
from holdfast.observability.log import get_logger
from holdfast.server.connections import GuardedConfig, GuardedProtocol, raw_answer
from holdfast.server.errors import ApiError
from holdfast.server.service import ServerLimits, Service

BACKLOG = 2048
SWEEP_SECONDS = 0.25
"""Interval of the checks of connections and engine."""
LAST_WORDS_SECONDS = 0.7
"""Time to write errors after the drain, or after the engine has died."""
IMPATIENT_SECONDS = 0.2
"""Time to write errors after a second signal."""
ENGINE_END_SECONDS = (0.7, 3.0)
"""Minimum and maximum wait for the current step and the core process. An abandoned core process ends with this
process."""
END_SECONDS = 1.8
"""Longest time from drain end to process exit, even if threads are busy."""
DOOR_SECONDS = 0.2
COLLECT_REQUESTS = 256
"""Minimum requests between two garbage collections."""
SPARE_FILES = 64
"""Open files besides connections: libraries, the model, the channel to its core, logs."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = get_logger("holdfast.server")


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; the port is exclusive."""

    def refused(kind: type[HoldfastError], reason: str) -> HoldfastError:
        return kind("http.cannot_listen", address=f"http://{shown(host)[1:-1]}:{port}", reason=reason)

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise refused(ConfigError, "this machine has no such host") from error
    family, kind, number, _, address = found[0]
    listener = socket.socket(family, kind, number)
    try:
        # Reuse the port of a server that has just ended; two servers never share one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reasons = {
            errno.EADDRINUSE: "another program uses the port",
            errno.EACCES: "this user may not use ports below 1024",
            errno.EPERM: "this user may not use the port",
        }
        reason = reasons.get(error.errno or 0) or error.strerror or "the system refuses"
        raise refused(HoldfastError, reason) from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listener on this machine."""
    name, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, str(name))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_file_limit(max_connections: int) -> str | None:
    """Raise the file limit of this process; return a warning if it is too low for its connections."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != unlimited and soft < max_connections + SPARE_FILES:
        return (
            f"--max-connections is {max_connections}, but this process may open only {soft} files (ulimit -n): "
            f"about {max(soft - SPARE_FILES, 0)} connections can be open at once"
        )
    return None


class WaitingDoor:
    """Answers 503 while a model opens, one client at a time with a short timeout."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="holdfast-door", daemon=True)

    def __enter__(self) -> "WaitingDoor":
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._end.close()
        self._thread.join()
        self._ended.close()

    def _run(self) -> None:
        error = ApiError("http.loading", headers={"Retry-After": "2"})
        while True:
            ready, _, _ = select.select([self._listener, self._ended], [], [])
            if self._ended in ready:
                return
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(DOOR_SECONDS)
                    with contextlib.suppress(OSError):
                        connection.recv(2**16)  # closing with unread input would lose the answer
                    connection.sendall(raw_answer(error))
                    connection.shutdown(socket.SHUT_WR)


class Server(uvicorn.Server):
    """uvicorn's server with connection sweeps, an engine watchdog and a bounded shutdown."""

    config: GuardedConfig

    def __init__(self, app: ASGIApp, service: Service, on_ready: Callable[[], None], *, owns_process: bool) -> None:
        super().__init__(GuardedConfig(app, service.limits))
        self.service = service
        self._on_ready = on_ready
        self._owns_process = owns_process
        self.death: EngineDeadError | None = None
        self.end_by = float("inf")
        """Deadline of the shutdown, by time.monotonic."""
        self._stop_event = asyncio.Event()
        self._collector = IdleCollector(COLLECT_REQUESTS)

    @property
    def limits(self) -> ServerLimits:
        return self.config.limits

    @property
    def guarded(self) -> list[GuardedProtocol]:
        """All connections."""
        return [one for one in self.server_state.connections if isinstance(one, GuardedProtocol)]

    def stop(self) -> None:
        """Handle a signal: the first drains, the second ends at once."""
        if self.should_exit:
            self.force_exit = True
            self.end_by = time.monotonic()
        self.should_exit = True
        self._stop_event.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Handle both signals while the server runs."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    async def main_loop(self) -> None:
        """Run until a signal or the engine's death."""
        if self._owns_process:
            keep_start()
        self._on_ready()
        while not self.should_exit:
            await self.on_tick(0)  # the date of answers
            for _ in range(round(1 / SWEEP_SECONDS)):
                self.sweep()
                self._look_at_engine()
                if self.should_exit:
                    return
                if self._owns_process and not self.server_state.tasks:
                    self._collector.look(self.server_state.total_requests)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SWEEP_SECONDS):
                        await self._stop_event.wait()

    def sweep(self) -> None:
        """Close overdue connections."""
        now = asyncio.get_running_loop().time()
        for connection in self.guarded:
            if connection.is_overdue(now):
                connection.cut()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain: let running requests finish until the deadline, then fail them."""
        if self.service.state == "ready":
            self.service.state = "draining"
        started = time.monotonic()
        patience = LAST_WORDS_SECONDS if self.death is not None else self.limits.drain_seconds
        self.end_by = started + patience + LAST_WORDS_SECONDS + ENGINE_END_SECONDS[0]
        if self._owns_process:
            _leave_after(patience + END_SECONDS, 0 if self.death is None else 1)
        if self.death is None and self._is_busy():
            _log.warning("shutting down: running requests may finish within %g s; a second signal ends them", patience)
        await self._drain(started + patience)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for task in list(self.server_state.tasks):
            task.cancel()
        self._part_idle()
        deadline = time.monotonic() + (IMPATIENT_SECONDS if self.force_exit else LAST_WORDS_SECONDS)
        while self._is_busy() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in self.guarded:
            connection.real.abort()
        await asyncio.sleep(0)

    async def _drain(self, deadline: float) -> None:
        """Wait until nothing runs, the deadline passes, or a second signal arrives. New requests get 503 meanwhile."""
        self._part_idle()
        while self.server_state.tasks and not self.force_exit:
            if time.monotonic() >= deadline:
                _log.warning("%d requests did not end in time", len(self.server_state.tasks))
                return
            await asyncio.sleep(0.02)
            self.sweep()
            self._part_idle()
            self._look_at_engine()
            if self.death is not None:
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)

    def _part_idle(self) -> None:
        """Close idle connections and those with an incomplete request."""
        for connection in self.guarded:
            connection.shutdown()

    def _is_busy(self) -> bool:
        unsent = any(connection.real.get_write_buffer_size() for connection in self.guarded)
        return unsent or bool(self.server_state.tasks)

    def _look_at_engine(self) -> None:
        if self.death is not None:
            return
        death = _death_of(self.service)
        if death is not None:
            self.death = death
            self.service.state = "dead"
            self.should_exit = True


def _death_of(service: Service) -> EngineDeadError | None:
    try:
        if service.llm.health().is_alive:
            return None
        service.llm.raise_if_dead()
    except EngineDeadError as error:
        return error
    return EngineDeadError("http.engine_thread_ended")


def run_server(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    on_ready: Callable[[], None],
    *,
    owns_process: bool = False,
) -> None:
    """Serve until a signal, then shut the model down. Raise EngineDeadError if the engine died.

    If the server owns the process, the process exits in bounded time, even if threads are busy.
    """
    server = Server(app, service, on_ready, owns_process=owns_process)
    try:
        asyncio.run(server.serve([listener]))
    finally:
        end_engine(service, server.end_by - time.monotonic())
    if server.death is not None:
        raise server.death


def end_engine(service: Service, seconds: float) -> None:
    """Shut the model down without waiting for a long step."""
    ending = threading.Thread(target=service.llm.shutdown, name="holdfast-end", daemon=True)
    ending.start()
    least, most = ENGINE_END_SECONDS
    ending.join(min(max(seconds, least), most))
    if ending.is_alive():
        _log.info("the model is still shutting down; not waiting for it")


def _leave_after(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
