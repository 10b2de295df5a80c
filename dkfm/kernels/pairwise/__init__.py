"""Blocks of values from two arrays of rows: inner products, distances, sums over columns. No kernel is known here."""
