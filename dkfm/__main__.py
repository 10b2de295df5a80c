"""Run the command line with ``python -m dkfm``."""

from dkfm.cli.app import main

if __name__ == "__main__":
    main()
