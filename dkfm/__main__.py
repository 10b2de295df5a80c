"""``python -m dkfm``."""

from dkfm.cli import main

if __name__ == "__main__":
    main()
