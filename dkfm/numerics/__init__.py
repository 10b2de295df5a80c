"""Solve for a model from a Gram matrix, and score rows with it."""
