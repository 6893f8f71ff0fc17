"""The entry point of `holdfast`: however a command ends, an exit code and at most one line on stderr; no torch."""

import sys


def main() -> None:
    """Run the command that the process was started with."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command; its exit code."""
    try:
        # Imported here, since Ctrl-C may come while they are.
        from holdfast.cli.commands import invoke

        code = invoke(arguments)
        sys.stdout.flush()
    except BaseException as error:
        from holdfast.cli.failures import report

        return report(error)
    return code
