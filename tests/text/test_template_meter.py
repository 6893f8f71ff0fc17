import pytest

from holdfast.text.template_meter import MAX_CALL_DEPTH, BudgetError, Meter, TemplateLimits

SMALL = TemplateLimits(max_steps=100, max_made_bytes=1000, max_output_chars=50, max_seconds=60)


def test_steps_run_out():
    meter = Meter(SMALL)
    for _ in range(100):
        meter.step()
    with pytest.raises(BudgetError, match="more than 100 steps"):
        meter.step()


def test_steps_run_out_at_once_when_many_are_asked_for():
    with pytest.raises(BudgetError, match="steps"):
        Meter(SMALL).step(10**30)


def test_steps_never_come_back():
    meter = Meter(SMALL)
    with pytest.raises(BudgetError):
        meter.step(-5)
    assert meter.steps_left == 100


def test_long_text_takes_more_steps():
    meter = Meter(SMALL)
    meter.scan(320)
    assert meter.steps_left == 100 - 11


def test_bytes_run_out_and_are_refused_before_they_are_made():
    meter = Meter(SMALL)
    meter.expect(1000)
    meter.make(900)
    with pytest.raises(BudgetError, match=r"1000 B"):
        meter.expect(101)
    with pytest.raises(BudgetError, match="builds"):
        meter.make_text(30, is_ascii=False)
    meter.make_text(30, is_ascii=True)


def test_output_runs_out():
    meter = Meter(SMALL)
    meter.write("x" * 50)
    with pytest.raises(BudgetError, match="more than 50 characters"):
        meter.write("x")


def test_calls_nest_only_so_deep():
    meter = Meter(SMALL)
    for _ in range(MAX_CALL_DEPTH):
        meter.enter()
    meter.leave()
    meter.enter()
    with pytest.raises(BudgetError, match="deep"):
        meter.enter()


def test_time_is_the_backstop():
    meter = Meter(TemplateLimits(max_steps=10**9, max_seconds=-1.0))
    meter.step(10)
    with pytest.raises(BudgetError, match="longer than"):
        meter.step(10_000)


def test_limits_grow_with_the_conversation():
    limits = SMALL.for_input(1000, 10)
    assert limits.max_steps > SMALL.max_steps + 1000
    assert limits.max_made_bytes > SMALL.max_made_bytes + 10_000
    assert limits.max_output_chars > SMALL.max_output_chars + 1000
    assert SMALL.for_input(0, 0) == SMALL
