"""Solve linear systems with Gram matrices of any size: by a Cholesky factor on disk, or by conjugate gradients."""
