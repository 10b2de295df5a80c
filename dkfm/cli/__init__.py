"""Run dkfm from the command line."""
