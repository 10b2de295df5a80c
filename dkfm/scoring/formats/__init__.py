"""Formats of outputs: how the scores of a chunk are written durably, read back and checked."""
