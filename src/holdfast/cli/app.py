"""The entry point of `holdfast`: however a command ends, an exit code and at most one line on stderr; no torch."""

import os
import sys

from holdfast.cli.interrupt import INTERRUPTED, leave_on_interrupt


def main() -> None:
    """Run the command that the process was started with."""
    leave_on_interrupt()
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        # The interpreter would take another second to put torch away.
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command; its exit code."""
    try:
        from holdfast.cli.commands import invoke

        code = invoke(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException as error:
        from holdfast.cli.failures import report

        return report(error)
    return code
