"""Read rows of .npy, Zarr, .npz and Parquet files, and of arrays in memory, through one protocol."""
