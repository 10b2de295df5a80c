"""Describe a store by a few facts, for `dkfm info`."""

import json
from contextlib import suppress
from math import isfinite
from pathlib import Path

from dkfm.core.chunking import count_tiles
from dkfm.errors import StoreError, UntrustedError
from dkfm.estimators.stored.components import StoredComponents
from dkfm.estimators.stored.ridge import StoredRidge, StoredRidgeClassifier
from dkfm.files.location import Location, locate
from dkfm.gram.linear_systems.tile_store import count_lower_tiles
from dkfm.kernels import serialization
from dkfm.scoring import completion, output_store
from dkfm.storage import csr, remote_stores, store_metadata
from dkfm.storage.model_store import Record, load_record

_SHOWN = 20
"""Number of entries of a list that are printed; JSON has all."""


def describe_store(path: str | Path) -> dict[str, object]:
    """Return facts about a Gram matrix, a factor or its root, a model or an output, as JSON values.

    Raises
    ------
    StoreError
        There is no dkfm store, or a store at a URL is neither a model nor an output.
    """
    root = locate(path)
    kind = remote_stores.read_store_kind(path)
    if kind == "scores":
        return {"kind": kind, "path": str(root), "format": store_metadata.VERSIONS[kind]} | _describe_scores(root)
    with remote_stores.open_model_folder(path) as folder:
        attributes = store_metadata.read_own_attributes(folder, kind)
        facts: dict[str, object] = {"kind": kind, "path": str(root), "format": attributes["version"]}
        return facts | _DESCRIBE[kind](folder, attributes)


def format_fact(value: object) -> str:
    """Return a fact in one line of text; of a long list, for example of classes or columns, the first entries.

    >>> format_fact(list("abcdefghijklmnopqrstuvwxyz"))[-21:]
    '"s", "t", and 6 more]'
    """
    if isinstance(value, list) and len(value) > _SHOWN:
        return f"{format_fact(value[:_SHOWN])[:-1]}, and {len(value) - _SHOWN:,} more]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def _describe_gram(root: Path, attributes: dict[str, object]) -> dict[str, object]:
    info = store_metadata.read_array_info(root / "gram")
    return {
        "kernel": identity.get("kernel") if isinstance(identity := attributes.get("identity"), dict) else None,
        "shape": list(info.shape),
        "tile_rows": info.chunks[0],
        "complete": (root / store_metadata.MARKER).exists(),
    }


def _describe_factor(root: Path, attributes: dict[str, object]) -> dict[str, object]:
    identity = attributes.get("identity")
    info, known = store_metadata.read_array_info(root / "factor"), identity if isinstance(identity, dict) else {}
    blocks = count_tiles(info.shape[0], info.chunks[0])
    return {
        "kernel": known.get("kernel"),
        "alpha": known.get("alpha"),
        "shape": list(info.shape),
        "tile_rows": info.chunks[0],
        "tiles": len(store_metadata.list_file_sizes(root / "factor")) - 1,
        "of": count_lower_tiles(blocks),
        "complete": (root / store_metadata.MARKER).exists(),
    }


def _describe_triangular_root(root: Path, attributes: dict[str, object]) -> dict[str, object]:
    identity = attributes.get("identity")
    info, known = store_metadata.read_array_info(root / "root"), identity if isinstance(identity, dict) else {}
    return {
        "kernel": known.get("kernel"),
        "shape": list(info.shape),
        "chunks": len(store_metadata.list_file_sizes(root / "root")) - 1,
        "of": info.grid[1],
        "complete": (root / store_metadata.MARKER).exists(),
    }


def _describe_model(root: Path, attributes: dict[str, object]) -> dict[str, object]:
    try:
        record = load_record(root, streamed=True)
    except UntrustedError as error:
        return {"kernel": attributes.get("kernel"), "code": str(error)}
    return {
        "estimator": record.estimator,
        "kernel": serialization.to_config(record.model.kernel),
        **_describe_rank(record),
        "landmarks": record.model.landmarks.shape[0],
        "columns": record.model.n_features_in,
        **({"column_names": record.feature_names} if record.feature_names else {}),
        "outputs": {name: head.width for name, head in record.model.heads.items()},
        **({"targets": list(record.target_names)} if record.target_names else {}),
        **({"classes": list(record.classes)} if record.classes else {}),
        **_describe_variance(record),
        **_describe_shrinkage(record),
        **_describe_penalty(record),
        "parameters": dict(record.parameters),
        "certificates": record.fitted.get("certificates"),
        "bytes": record.model.total_nbytes,
        "digest": record.digest,
    }


def _describe_rank(record: Record) -> dict[str, object]:
    """Return the rank of a feature map, if its record is valid."""
    known = [record.extra_arrays[name] for name in ("eigenvalues", "pivots") if name in record.extra_arrays]
    return {"rank": len(known[0])} if record.estimator == "ExactFeatureMap" and known else {}


def _describe_variance(record: Record) -> dict[str, object]:
    """Return the share of the variance that components explain, if it is known and the record is valid."""
    if record.estimator != "KernelPCA":
        return {}
    with suppress(Exception):  # a record of an unknown store may raise anything
        share = StoredComponents.from_record(record).explained_share
        return {"explained_share": share} if isfinite(share) else {}
    return {}


def _describe_shrinkage(record: Record) -> dict[str, object]:
    """Return the shrinkage of discriminants, as given or as selected, if the record is valid."""
    numbers = record.fitted.get("numbers") if record.estimator == "KernelFisher" else None
    value = numbers.get("shrinkage") if isinstance(numbers, dict) else None
    return {"shrinkage": value} if isinstance(value, float) and isfinite(value) else {}


def _describe_penalty(record: Record) -> dict[str, object]:
    """Return the penalty of a regression, and the errors of left-out rows that chose it, if the record is sound."""
    classes = {"KernelRidge": StoredRidge, "KernelRidgeClassifier": StoredRidgeClassifier}
    with suppress(Exception):  # a record of an unknown store may raise anything
        return classes[record.estimator].from_record(record).describe_penalty()
    return {}


def _describe_row_store(root: Path, attributes: dict[str, object]) -> dict[str, object]:
    """Return facts about a store of rows, which holds a dense array or the three arrays of CSR."""
    if (root / "rows").is_dir():
        info = store_metadata.read_array_info(root / "rows")
        return {"shape": list(info.shape), "chunk_rows": info.chunks[0]}
    _, values, pointers = (store_metadata.read_array_info(root / name).shape[0] for name in csr.array_names("rows"))
    return {"rows": pointers - 1, "values": values}


def _describe_scores(root: Location) -> dict[str, object]:
    output = output_store.read_output(root)
    targets = [] if output.classes else [label for columns in output.columns for label in columns.labels]
    facts: dict[str, object] = {
        "outputs": {columns.output: columns.width for columns in output.columns},
        **({"targets": targets} if targets else {}),
        **({"classes": list(output.classes)} if output.classes else {}),
        "rows": output.rows,
        "chunk_rows": output.chunk_rows,
        "chunks": output.n_chunks,
        "dtype": output.compute_dtype,
        "model": dict(output.model),
        "input": dict(output.input),
        "settings": dict(output.settings),
    }
    try:
        receipts = completion.open_complete(root)[1]
    except StoreError as error:
        done = len({receipt.chunk for receipt in completion.iter_journal_receipts(output)})
        return facts | {"complete": False, "reason": str(error), "chunks_in_the_journal": done}
    invalid, size = int(receipts.invalid_rows.sum()), int(receipts.bytes.sum())
    return facts | {"complete": True, "invalid_rows": invalid, "bytes": size}


_DESCRIBE = {
    "factor": _describe_factor,
    "gram": _describe_gram,
    "model": _describe_model,
    "root": _describe_triangular_root,
    "rows": _describe_row_store,
}
"""For each kind of store, the function that returns facts about it from its folder and attributes."""
