"""Print one line if this Python cannot build the virtual environment, with the reason; parses on any Python 3."""

import sys
from importlib.util import find_spec

OLDEST = (3, 11)
OLD_VERSION = "Python {0}.{1} or newer is required; this is Python {2}.{3}; install a newer one and run make PYTHON=python3.11 demo"
NO_VENV = "this Python {2}.{3} comes without venv; install it (Debian and Ubuntu: the package python{2}.{3}-venv)"


def complaint(version, has_venv):  # noqa: ANN001, ANN201 (must parse where annotations do not)
    """Return the problem and the fix; empty if all is well."""
    if tuple(version[:2]) < OLDEST:
        return OLD_VERSION.format(OLDEST[0], OLDEST[1], version[0], version[1])
    if not has_venv:
        return NO_VENV.format(OLDEST[0], OLDEST[1], version[0], version[1])
    return ""


def main():  # noqa: ANN201
    """Exit 1 with the complaint, if there is one."""
    words = complaint(sys.version_info, find_spec("venv") is not None and find_spec("ensurepip") is not None)
    if words:
        sys.exit("error: " + words)


if __name__ == "__main__":
    main()
