"""Find eigenvalues and eigenvectors of symmetric matrices: all of them, or the largest."""
