"""Benchmarks: dkfm beside scikit-learn, and beside its arithmetic alone."""
