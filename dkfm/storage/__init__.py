"""The stores of dkfm: their schema, their checks, models and CSR rows in Zarr."""
