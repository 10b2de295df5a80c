"""Rows of .npy, Zarr, .npz and Parquet files, and of arrays in memory, behind one protocol."""
