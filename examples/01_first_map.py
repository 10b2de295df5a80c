"""
A first map
===========

Map points to plain vectors. The inner product of a training point and a new point is exact. See the errors: about
1e-15 in every basis, and larger between two new points, by at most what the residual says. The picture shows the
spectrum of the Gram matrix, and the errors of all pairs of landmarks with the certificate.
"""

import sys

import numpy as np

import dkfm


def main(rows: int = 1000) -> None:
    """Map some points and hold their inner products against the kernel."""
    rng = np.random.default_rng(0)
    train, new = rng.normal(size=(rows, 5)), rng.normal(size=(rows, 5))
    kernel = dkfm.kernels.Gaussian(2.0)

    phi = dkfm.ExactFeatureMap(kernel).fit(train)
    features = phi.transform(new)  # plain vectors: any linear algorithm takes them
    error = np.abs(phi.transform(train) @ features.T - kernel(train, new)).max()
    print(f"features          {features.shape[0]} x {features.shape[1]}, rank {phi.rank_}")
    print(f"error             {error:.1e}, training points with new ones")
    print(f"certificate       {phi.certificate_}")

    # Two new points are exact up to what neither shares with the training points, and dkfm says how much that is.
    between = np.abs(features @ features.T - kernel(new)).max()
    print(f"error, both new   {between:.1e}, and at most {phi.residual(new).max():.1e}")

    # The other bases have the same inner products in fewer, or cheaper, features.
    for basis in ("spectral", "cholesky"):
        other = dkfm.ExactFeatureMap(kernel, basis=basis).fit(train)
        same = np.abs(other.transform(train) @ other.transform(new).T - kernel(train, new)).max()
        print(f"error, {basis:<10} {same:.1e} with {other.rank_} features")
    dkfm.plotting.display(phi)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
