"""Find, start, and connect to Dask clusters."""
