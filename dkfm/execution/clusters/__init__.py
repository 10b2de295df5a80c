"""Dask clusters: found, started and connected to."""
