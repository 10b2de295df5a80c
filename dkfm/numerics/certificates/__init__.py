"""Certificates: what a model returns is measured against what it promises."""
