"""Handle rows, chunks and bytes for all other folders; this folder uses NumPy and SciPy, and knows no kernel."""
