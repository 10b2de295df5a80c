"""What the tests of s3 share."""

import io

import numpy as np


def npy(values, **options):
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def flip(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
