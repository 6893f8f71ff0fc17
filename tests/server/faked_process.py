"""A server process over a core of fakes in a process of its own: `python -m server.faked_process KIND DRAIN_SECONDS`; no torch."""

import sys

from engine.fakes import shared_template, shared_tokenizer
from holdfast.api.async_llm import AsyncLLM
from holdfast.cli.app import report
from holdfast.cli.terminal import log_plainly
from holdfast.config import EngineConfig
from holdfast.engine.core_process import CoreProcess
from holdfast.engine.engine import Engine
from holdfast.server.app import make_app
from holdfast.server.logs import RequestLog
from holdfast.server.run import bind_socket, run_server
from holdfast.server.service import ServerLimits, Service

FAKE = (sys.executable, "-P", "-m", "engine.fake_core")


def main() -> None:
    """Print "ready PORT CORE_PID" when requests are taken."""
    log_plainly()
    kind, drain_seconds = sys.argv[1], float(sys.argv[2])
    listener = bind_socket("127.0.0.1", 0)
    config = EngineConfig.from_options(model=kind)
    core = CoreProcess(config, lambda done, total: None, command=FAKE)
    llm = AsyncLLM.from_engine(Engine(core, shared_tokenizer(), shared_template(), 0))
    limits = ServerLimits(drain_seconds=drain_seconds, header_seconds=30.0)
    service = Service(llm, ("fake",), limits)
    app = make_app(service, log=RequestLog())
    words = f"ready {listener.getsockname()[1]} {core.pid}"
    run_server(app, service, listener, lambda: print(words, flush=True), owns_process=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(report(error))
