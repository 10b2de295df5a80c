"""Provide what several estimators share: scoring, saving, transforming, and their display in a notebook."""
