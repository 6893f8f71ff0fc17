"""Run a test over many values in one item: reporting a case costs milliseconds, which is more than many cases take."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def for_each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with each value, or each tuple of values for several names; a failure says with which."""
    cases = list(values)
    wanted = [name.strip() for name in names.split(",")]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            assert cases, f"no {names}"
            for case in cases:
                given = dict(zip(wanted, case, strict=True)) if len(wanted) > 1 else {wanted[0]: case}
                try:
                    test(**fixtures, **given)
                except BaseException as error:
                    error.add_note(f"with {given}")
                    raise

        parameters = inspect.signature(test).parameters.values()
        # pytest reads here which fixtures the test takes.
        run.__signature__ = inspect.Signature([one for one in parameters if one.name not in wanted])  # type: ignore[attr-defined]
        return run

    return decorate
