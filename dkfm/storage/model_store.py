"""Write a fitted estimator to a store and read it back, without pickle.

The marker lists the SHA-256 checksum of every file, so that a change of any byte is detected.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dkfm.core.rows import Array, Rows, as_rows
from dkfm.errors import BudgetError, DamagedStoreError, StoreError, UnsupportedStoreError, extract_reason
from dkfm.files.local import open_plain
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics import links
from dkfm.numerics.model import Head, Model, iter_weight_panels
from dkfm.storage import csr, json_reading, raw_chunk_reader, store_metadata, zarr_store
from dkfm.storage.streamed_weights import CHUNK_BYTES, count_columns_within, open_weights

if TYPE_CHECKING:
    import zarr

_PARALLEL_FILES = 4
"""Number of files whose checksums are computed at a time."""

_MAX_SERIAL_BYTES = 2**24
"""Largest size of all files, in bytes, for which one thread is faster than several."""


MAX_LABEL_CHARACTERS = 1000
"""Largest length of a text label in a table; a reader takes the memory of a label for each row."""


@dataclass(frozen=True, eq=False)
class Record:
    """Content of a model store: the model, and the parameters and attributes that restore its estimator."""

    estimator: str
    """Name of the estimator in the closed registry."""
    parameters: Mapping[str, object]
    """Parameters of the estimator, as plain JSON values."""
    fitted: Mapping[str, object]
    """Fitted attributes of the estimator, as plain JSON values."""
    extra_arrays: Mapping[str, Array]
    """Fitted arrays that are not part of the model."""
    model: Model
    """Kernel, landmarks and heads."""
    digest: str = ""
    """Digest of every byte of the store; empty before it is saved."""

    @property
    def classes(self) -> tuple[str | int | float, ...]:
        """Class labels of a classifier, ascending and of one type; empty for other models."""
        classes, heads = self.fitted.get("classes"), self.model.heads.values()
        counts = {links.count_classes(head.n_columns) for head in heads if links.returns_codes(head.link)}
        if classes is None and not counts:
            return ()
        if not isinstance(classes, list) or not are_labels(classes):
            raise UnsupportedStoreError("The classes of this model are not what dkfm writes.")
        if counts - {len(classes)}:
            raise UnsupportedStoreError(f"This model decides between {counts.pop()} classes, and names {len(classes)}.")
        return tuple(classes)

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the targets of a regression; empty if they had none."""
        names = self.parameters.get("target_names")
        if names is None:
            return ()
        if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
            raise UnsupportedStoreError("The names of the targets of this model are not what dkfm writes.")
        if not len(set(names)) == len(names) == self.model.head("predict").width:
            raise UnsupportedStoreError("The names of the targets of this model are not one for each of them.")
        return tuple(names)

    @property
    def feature_names(self) -> list[str] | None:
        """Column names of the training rows; None if they had none."""
        names = self.fitted.get("feature_names")
        return [str(name) for name in names] if isinstance(names, list) and names else None


def are_labels(values: Sequence[Any]) -> bool:
    """Return whether values are ascending labels of one type that NumPy can represent."""
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {bool, int, float, str}:
        return False
    fits = kinds != {int} or (values[0] >= -(2**63) and values[-1] < (2**63 if values[0] < 0 else 2**64))
    return fits and all(before < after for before, after in pairwise(values))


def save_record(path: Path, record: Record, *, overwrite: bool = False) -> str:
    """Write a model store and return its digest; nothing is pickled.

    Raises
    ------
    StoreExistsError
        Something exists at the path.
    KernelError
        The kernel has a class of the user, or a function that cannot be imported.
    """
    arrays, landmarks = dict(record.extra_arrays), record.model.landmarks
    if isinstance(landmarks, np.ndarray):
        arrays["landmarks"] = landmarks
    names: dict[int, str] = {}

    def name_of(array: Array | None) -> str | None:
        if array is None:
            return None
        name = names.setdefault(id(array), f"head.{len(names)}")
        arrays[name] = array
        return name

    heads = {
        name: {
            "weights": name_of(head.weights),
            "offset": name_of(head.offset),
            "rotation": name_of(head.sqrt_eigenvalues),
            "link": head.link,
            "triangular": head.triangular,
            "first": head.n_leading_columns,
        }
        for name, head in record.model.heads.items()
    }
    attributes = {
        "estimator": record.estimator,
        "parameters": record.parameters,
        "fitted": record.fitted,
        "kernel": serialization.to_config(record.model.kernel),
        "sparse_columns": None if isinstance(landmarks, np.ndarray) else landmarks.shape[1],
        "heads": heads,
        "shift": name_of(record.model.shift),
        "extra": sorted(record.extra_arrays),
    }
    sparse = [] if isinstance(landmarks, np.ndarray) else csr.array_names("landmarks")
    with zarr_store.new_store(path, "model", attributes, [*arrays, *sparse], overwrite=overwrite) as group:
        if not isinstance(landmarks, np.ndarray):
            csr.write_csr(group, "landmarks", landmarks, str(landmarks.dtype))
        for name, values in arrays.items():
            _write_array(group, name, values)
        root = Path(group.store.root)  # type: ignore[attr-defined]  # a local store has this attribute
        checksums = _compute_checksums(root, sorted(store_metadata.list_files(root)))
        digest = _manifest_digest(checksums)
        zarr_store.write_completion_marker(root, {"files": checksums, "digest": digest})
    return digest


def _write_array(group: "zarr.Group", name: str, values: Array) -> None:
    """Add an array to a store; weights are read and written some columns at a time."""
    is_weights = name.startswith("head.") and values.ndim == 2
    chunks = _column_chunk_shape(values) if is_weights else _row_chunk_shape(values)
    array = zarr_store.add_array(group, name, values.shape, chunks, str(values.dtype))
    if is_weights:
        for columns, panel in iter_weight_panels(values, values.shape[1], False):
            array[:, columns] = panel
    else:
        array[...] = values


def _column_chunk_shape(weights: Array) -> tuple[int, int]:
    n, r = weights.shape
    return max(1, n), max(1, min(r, count_columns_within(CHUNK_BYTES, n, weights.dtype.itemsize)))


def _row_chunk_shape(values: Array) -> tuple[int, ...]:
    rows = max(1, min(len(values), CHUNK_BYTES // max(1, values.nbytes // max(1, len(values)))))
    return (rows, *(max(1, length) for length in values.shape[1:]))


def _compute_checksums(root: Path, names: list[str]) -> dict[str, str]:
    """Return the checksum of each file; large files in parallel, because every job begins with checksums."""
    try:
        small = sum((root / name).stat().st_size for name in names) <= _MAX_SERIAL_BYTES
    except OSError:
        small = True  # `compute_sha256` raises with the name of the file and the reason
    if small:
        return {name: compute_sha256(root / name) for name in names}
    with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="dkfm-sums") as pool:
        return dict(zip(names, pool.map(lambda name: compute_sha256(root / name), names), strict=True))


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 digest of a plain file, in hexadecimal."""
    try:
        with open_plain(path, json_reading.MAX_JSON if path.name == "zarr.json" else None) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from None


def _manifest_digest(checksums: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()


def load_record(
    path: Path, digest: str | None = None, trusted: Collection[str] = (), *, streamed: bool = False
) -> Record:
    """Read a model store after the checksums of all files were verified.

    Parameters
    ----------
    path : Path
        Folder of the store.
    digest : str, optional
        Expected digest of the model; any by default.
    trusted : collection of str
        Functions, as ``module:function``, that may be imported and run as the kernel.
    streamed : bool
        Whether the weights of heads stay in the store, and are read from there whenever they are needed.

    Raises
    ------
    StoreError
        There is no store, or it is incomplete, damaged, of another format, or has an untrusted function. The subclass
        of the error shows which.
    """
    attributes = store_metadata.read_own_attributes(path, "model")
    stored_digest = _read_verified_digest(path)
    if digest is not None and stored_digest != digest:
        raise DamagedStoreError(
            f"{path} holds another model than the one that was asked for: it was replaced, or it is another path."
        )
    try:
        return _read_record(path, attributes, stored_digest, trusted, streamed)
    except (StoreError, BudgetError):
        raise
    except MemoryError as error:
        size = sum((path / name).stat().st_size for name in store_metadata.list_files(path))
        raise BudgetError(f"{path} has {size} bytes, and this process has no memory for them.") from error
    except Exception as error:  # constructors may raise anything for untrusted values
        raise UnsupportedStoreError(f"{path} is not a model that dkfm can read: {extract_reason(error)}.") from error


def _read_verified_digest(path: Path) -> str:
    """Verify the checksum of every file against the marker; return the digest of the checksums."""
    marker = store_metadata.read_completion_marker(path)
    checksums = marker.get("files")
    if not isinstance(checksums, dict) or _manifest_digest(checksums) != marker.get("digest"):
        raise DamagedStoreError(f"The marker {path / store_metadata.MARKER} is damaged.")
    present = set(store_metadata.list_files(path)) - {store_metadata.MARKER}
    if different := present.symmetric_difference(checksums):
        name = min(different)
        what = f"gained {name} since it was written; remove it" if name in present else f"lost {name}"
        raise DamagedStoreError(f"{path} has {what}.")
    metadata = {name for name in present if name.rpartition("/")[2] == "zarr.json"}
    _require_checksums(path, metadata, checksums)
    for name in metadata - {"zarr.json"}:  # before hashing, which could take days for a file that was extended
        array = (path / name).parent
        if (array / "c").exists():
            store_metadata.require_chunks(array, store_metadata.read_array_info(array))
    _require_checksums(path, present - metadata, checksums)
    return str(marker["digest"])


def _require_checksums(path: Path, names: Iterable[str], checksums: Mapping[str, object]) -> None:
    for name, checksum in _compute_checksums(path, sorted(names)).items():
        if checksum != checksums[name]:
            raise DamagedStoreError(f"{path / name} is not what dkfm wrote: a byte of it changed.")


def _read_record(
    path: Path, attributes: dict[str, object], digest: str, trusted: Collection[str], streamed: bool = False
) -> Record:
    kernel = serialization.from_config(attributes["kernel"], trusted)
    stored: dict[tuple[str, bool], Array] = {}

    def array(name: object, triangular: object = None) -> Array | None:
        if name is None:
            return None
        name = store_metadata.require_array_name(path, name)
        key = (name, streamed and triangular is True)
        if key not in stored:
            info = store_metadata.read_array_info(path / name)
            store_metadata.require_chunks(path / name, info)
            if streamed and triangular is not None and len(info.shape) == 2:
                stored[key] = open_weights(path, digest, name, info, triangular is True)
            else:
                stored[key] = cast("Array", raw_chunk_reader.read_own_array(path / name))
        return stored[key]

    landmarks = _read_landmarks(path, attributes, array)
    n = landmarks.shape[0]
    heads = {
        str(name): _build_head(array(h["weights"], h["triangular"]), array(h["offset"]), array(h["rotation"]), h, n)
        for name, h in _require_dict_items(attributes["heads"])
    }
    if not heads:
        raise UnsupportedStoreError(f"{path} has no output.")
    extra = {str(name): _require_not_none(array(name)) for name in _require_list(attributes["extra"])}
    return Record(
        estimator=str(attributes["estimator"]),
        parameters=dict(_require_dict_items(attributes["parameters"])),
        fitted=dict(_require_dict_items(attributes["fitted"])),
        extra_arrays=extra,
        model=_build_model(kernel, landmarks, heads, array(attributes["shift"])),
        digest=digest,
    )


def _build_model(kernel: Kernel, landmarks: Rows, heads: dict[str, Head], shift: Array | None) -> Model:
    landmarks = _restore_precision(landmarks, heads)
    if any(head.weights.dtype != landmarks.dtype for head in heads.values()):
        raise UnsupportedStoreError("A head's weights are not of the precision of the landmarks.")
    allowed = shift is not None and isinstance(landmarks, np.ndarray) and kernel.translation_invariant
    if shift is not None and not (allowed and shift.shape == landmarks.shape[1:] and np.isfinite(shift).all()):
        raise UnsupportedStoreError("A model has a shift that does not fit its landmarks or its kernel.")
    return Model(kernel, landmarks, heads, shift)


def _restore_precision(landmarks: Rows, heads: dict[str, Head]) -> Rows:
    """Return landmarks in the precision of the heads, if that is exact; earlier versions wrote CSR rows as float64."""
    if isinstance(landmarks, np.ndarray) or any(head.weights.dtype != np.float32 for head in heads.values()):
        return landmarks
    with np.errstate(over="ignore"):  # then it is not exact
        narrow = landmarks.astype(np.float32)
    return narrow if np.array_equal(narrow.data, landmarks.data) else landmarks


def _read_landmarks(path: Path, attributes: dict[str, object], read_array: Callable[[object], Array | None]) -> Rows:
    if (columns := attributes.get("sparse_columns")) is None:
        return as_rows(read_array("landmarks"), "landmarks")
    if type(columns) is not int or not 0 < columns < 2**31:
        raise UnsupportedStoreError(f"{path} has sparse landmarks of {columns!r} columns.")
    csr.require_csr_complete(path, "landmarks")
    return as_rows(csr.read_csr(path, "landmarks", columns), "landmarks")


def _build_head(
    weights: Array | None, offset: Array | None, rotation: Array | None, config: dict[str, Any], n: int
) -> Head:
    links.link_by_name(config["link"])
    weights = _require_not_none(weights)
    vectors = [v for v in (offset, rotation) if v is not None]
    in_memory = [weights, *vectors] if isinstance(weights, np.ndarray) else vectors
    if not all(np.isfinite(array).all() for array in in_memory):
        raise UnsupportedStoreError("A head has weights that are not finite.")
    if any(v.dtype != weights.dtype or v.dtype.kind != "f" for v in (weights, *vectors)):
        raise UnsupportedStoreError("A head's arrays are not of one precision.")
    triangular, first = config["triangular"], config["first"]
    expected = (first,) if type(first) is int and rotation is None else weights.shape[1:]
    if weights.ndim != 2 or weights.shape[0] != n or any(v.shape != expected for v in vectors):
        raise UnsupportedStoreError("A head's weights, offset and rotation do not fit the landmarks or each other.")
    square = weights.shape == (n, n)
    below = triangular and square and isinstance(weights, np.ndarray) and any(weights[i, :i].any() for i in range(n))
    if not isinstance(triangular, bool) or (triangular and (not square or below)):
        raise UnsupportedStoreError("A head's weights are said to be triangular, and are not.")
    valid = type(first) is int and 0 <= first <= weights.shape[1] and not triangular and rotation is None
    if first is not None and not valid:
        raise UnsupportedStoreError("A head uses columns of its weights that are not there.")
    return Head(weights, offset, rotation, str(config["link"]), triangular, first)


def _require_not_none(array: Array | None) -> Array:
    if array is None:
        raise UnsupportedStoreError("An array that every model has is missing.")
    return array


def _require_dict_items(value: object) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise UnsupportedStoreError("A model's attributes are not what dkfm writes.")
    return list(value.items())


def _require_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise UnsupportedStoreError("A model's attributes are not what dkfm writes.")
    return value
