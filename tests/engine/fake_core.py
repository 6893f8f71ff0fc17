"""A core of fakes in a process of its own, without torch; what happens to it is the name of its model."""

import os
import sys
import time

from engine.fakes import make_engine
from holdfast.engine.core import EngineCore
from holdfast.engine.core_process import main
from holdfast.errors import MemoryPlanError, PlanChange, PlanRow, PlanTable, UnsupportedModelError
from holdfast.observability.preparing import Preparing

TABLE = PlanTable("serve", (PlanRow("weights", 7, "because"),), 7, 5, "a limit")
CHANGE = PlanChange("take less", "--less", 3, 2)


def open_core(config, on_progress, on_prepare) -> EngineCore:
    """An EngineCore of a HashRunner, or the failure that the config names."""
    name = config.model or ""
    for num_done in range(3):
        on_progress(num_done, 2)
    on_prepare(Preparing("Compiling fakes", 1, 1, "kept nowhere"))
    if name == "refused":
        raise UnsupportedModelError("value.empty", name="weights")
    if name == "does not fit":
        error = MemoryPlanError("value.too_large", name="fake", maximum=5, value=7, table=TABLE)
        error.changes = (CHANGE,)
        raise error
    if name == "fails":
        raise OSError("no weights today")
    if name == "exits":
        sys.stderr.write("what it said last\n")
        sys.stderr.flush()
        os._exit(3)
    if name == "never ready":
        time.sleep(600)
    engine = make_engine(
        run_ahead=int(name == "ahead"),
        max_queue=config.max_queue,
        max_model_len=256,
        num_pages=400,
        clock=time.monotonic,
    )
    runner, core = engine.runner, engine.core
    runner.script["stop here"] = list(b"abcENDxyz")
    num_steps = 0

    def on_step(step) -> None:
        nonlocal num_steps
        if name in ("dies", "exits late") and len(step.scheduled) < 2:
            return  # the second request is on its way, and must find a sequence
        num_steps += 1
        if name == "layers":
            for _ in range(200):
                time.sleep(0.05)
                core.check_needed()
        elif name == "slow":
            time.sleep(0.03)
        elif num_steps == 5 and name == "dies":
            raise OSError("device lost")
        elif num_steps == 5 and name == "exits late":
            sys.stderr.write("no words for it\n")
            sys.stderr.flush()
            os._exit(7)
        elif num_steps == 5 and name == "hangs":
            time.sleep(600)

    runner.on_step = on_step
    assert isinstance(core, EngineCore)
    return core


if __name__ == "__main__":
    main(open_core)
