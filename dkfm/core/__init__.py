"""Rows, chunks and bytes: what every other folder builds on. It knows NumPy and SciPy, and no kernel."""
