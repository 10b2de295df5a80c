"""What every saved estimator obeys."""

import numpy as np

import dkfm


def check_store(estimator, Z, path):
    """A loaded estimator is the saved one to the last bit, and the saved store refuses to be overwritten."""
    estimator.save(path)
    loaded = dkfm.load(path)
    assert type(loaded) is type(estimator)
    assert loaded.kernel_ == estimator.kernel_
    assert loaded.certificate_ == estimator.certificate_
    assert loaded.get_params()["kernel"] == estimator.kernel_
    for name, array in estimator._to_record().extra_arrays.items():
        np.testing.assert_array_equal(getattr(loaded, f"{name}_"), array)
    np.testing.assert_array_equal(loaded.transform(Z), estimator.transform(Z))
