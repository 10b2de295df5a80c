"""Run tasks on threads of this process or on a Dask cluster."""
