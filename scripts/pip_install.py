"""Run pip install with its progress bars, but without warnings about mirrors that lack a package."""

import subprocess
import sys

NOISE = "is ignored: it is neither a file nor a directory"
"""pip's warning about each extra index or folder in its settings that lacks a package."""


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
