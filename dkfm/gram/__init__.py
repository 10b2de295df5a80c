"""Build Gram matrices with Dask tasks, and multiply them out of core."""
