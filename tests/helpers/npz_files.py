"""What the tests of npz share."""

import io
import struct
import zipfile

import numpy as np
import pytest
import scipy.sparse as sp

from dkfm.errors import InvalidInputError
from dkfm.sources.opening import open_source


def save(path, matrix, compressed=True):
    sp.save_npz(path, matrix, compressed=compressed)
    return path


def npy(array, version=(1, 0), **header):
    """The bytes of a .npy file, of which the header may say something else."""
    array, found = np.asanyarray(array), io.BytesIO()
    said = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | header
    text = str(said).encode() + b"\n"
    found.write(b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text)
    return found.getvalue() + array.tobytes()


def members(matrix, **other):
    """The members of a file, some of them other bytes, or none."""
    parts = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr}
    parts |= {"shape": np.array(matrix.shape), "format": np.array(b"csr")}
    found = {name: npy(part) for name, part in parts.items()} | other
    return {f"{name}.npy": content for name, content in found.items() if content is not None}


def archive(path, contents, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as opened:
        for name, content in contents.items():
            opened.writestr(name, content)
    return path


def refusal(path, rows=slice(0, 200)):
    with pytest.raises(InvalidInputError) as caught:
        open_source(path).read(rows)
    assert "\n" not in str(caught.value)
    return str(caught.value)
