"""`python -m holdfast`: the same as the command `holdfast`; no torch."""

from holdfast.cli.app import main

if __name__ == "__main__":
    main()
