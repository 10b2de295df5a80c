"""Build Gram matrices with Dask tasks, multiply them out of core, and solve linear systems with them."""
