"""Compare kernels on the same labelled rows."""
