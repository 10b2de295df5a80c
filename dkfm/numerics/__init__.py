"""Compute models from Gram matrices, and score rows with them."""
