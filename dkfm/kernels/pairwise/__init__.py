"""Compute inner products, distances and sums over columns for all pairs of rows, independently of any kernel."""
