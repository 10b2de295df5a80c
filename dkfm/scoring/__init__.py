"""Score many rows in batch jobs, and read and verify the outputs."""
