"""pip install, with its own progress bars, and without its warnings about mirrors that lack a package."""

import subprocess
import sys

NOISE = "is ignored: it is neither a file nor a directory"
"""A second index or folder in pip's own settings that lacks a package: pip says so for each one, and goes on."""


def main() -> int:
    """Run pip with the given arguments; its exit status is ours."""
    command = [sys.executable, "-m", "pip", "install", *sys.argv[1:]]
    # Only stderr passes through here: bars need a terminal, and warnings go to stderr.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None, "stderr must be a pipe"
        for line in process.stderr:
            if NOISE not in line:
                sys.stderr.write(line)
                sys.stderr.flush()
    return process.returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
