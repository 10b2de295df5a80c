"""Read class labels from a column of a Parquet table."""

import numpy as np
import numpy.typing as npt

from dkfm.errors import InvalidInputError
from dkfm.sources.parquet import ParquetSource
from dkfm.sources.parquet_files.schemas import is_text, pa
from dkfm.storage.model_store import MAX_LABEL_CHARACTERS


def read_label_column(source: ParquetSource, name: str) -> npt.NDArray[np.generic]:
    """Return the labels (n,) in a column of a table, or in the key of its folders, as ``country=de``.

    Parameters
    ----------
    source : ParquetSource
        Rows of other columns of the table.
    name : str
        Name of the column, or of the key.

    Raises
    ------
    InvalidInputError
        There is no such column, a row has no label, or the labels are neither text, booleans nor whole numbers.
    """
    labelled = ParquetSource.open(source.table_files, source.columns[:1], name)  # the labels take the place of ids
    labels, what = labelled.read_ids(slice(0, labelled.shape[0])), f"The label column {name!r} of {source.name}"
    if labels.null_count:
        raise InvalidInputError(
            f"{what} has no label in {labels.null_count:,} of {len(labels):,} rows; leave these rows out."
        )
    if is_text(labels.type):
        encoded = labels.cast(pa.large_string()).dictionary_encode()
        texts = encoded.dictionary.to_pylist()
        if max(map(len, texts)) > MAX_LABEL_CHARACTERS or len({text.rstrip("\0") for text in texts}) < len(texts):
            raise InvalidInputError(
                f"{what} has text that is no label: longer than {MAX_LABEL_CHARACTERS} "
                "characters, or equal but for trailing NULs."
            )
        return np.asarray(np.array(texts, dtype=np.str_)[encoded.indices.to_numpy()])
    if pa.types.is_integer(labels.type) or pa.types.is_boolean(labels.type):
        return np.asarray(labels.to_numpy(zero_copy_only=False))
    if not (pa.types.is_floating(labels.type) or pa.types.is_decimal(labels.type)):
        raise InvalidInputError(f"{what} holds {labels.type}, and must hold text, booleans or whole numbers.")
    try:
        return np.asarray(labels.cast(pa.int64()).to_numpy())
    except pa.ArrowInvalid:
        raise InvalidInputError(
            f"{what} has fractions, NaN or numbers beyond 64 bits, and labels are text or "
            f"whole numbers; dkfm fit --method ridge --target-columns {name} predicts numbers."
        ) from None
