"""Kernels compared on the same labelled rows."""
