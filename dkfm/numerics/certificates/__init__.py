"""Measure the error of fitted models against their definitions."""
