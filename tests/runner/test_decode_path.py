"""Files and functions of the package that one decode step on a CPU passes through, counted as it runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import holdfast
from cli.cli_models import make_model
from holdfast.api.llm import LLM
from holdfast.request.sampling_params import SamplingParams

MAX_FILES = 32
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PACKAGE = Path(holdfast.__file__).parent


@contextmanager
def recorded_calls() -> Iterator[dict[str, set[str]]]:
    """Collect the functions of the package that run in this thread, by file."""
    calls: dict[str, set[str]] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            calls.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(frame.f_code.co_qualname)

    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def test_decode_step_on_cpu_passes_few_files(tmp_path: Path) -> None:
    llm = LLM(model=str(make_model(tmp_path / "tiny")), device="cpu", dtype="float32", max_model_len=64)
    engine = llm.engine
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, PARAMS)
    for _ in range(3):  # the prompt, and what is only done in a first decode step
        engine.step()
    with recorded_calls() as calls:
        engine.step()
    assert "runner/runner.py" in calls, "no step ran"
    assert len(calls) <= MAX_FILES, f"{len(calls)} files: {sorted(calls)}"
