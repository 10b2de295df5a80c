"""Read the files of a Parquet table: their list, their footers and their row groups."""
