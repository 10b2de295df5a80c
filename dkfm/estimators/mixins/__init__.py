"""Provide what several estimators share: scoring and saving, transforming, and how a notebook shows them."""
