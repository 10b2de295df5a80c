"""Read the files of a Parquet table: their list, schemas, footers and row groups."""
