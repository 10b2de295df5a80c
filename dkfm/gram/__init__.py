"""Gram matrices: built as Dask tasks, and multiplied with while they stay in their store."""
