"""What the tests of parquet share."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dkfm.errors import InvalidInputError
from dkfm.sources.parquet import ParquetSource


def table(rows, names="abc"):
    return pa.table({name: rows[:, place] for place, name in enumerate(names)})


def write(path, data, group_rows=100, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(data if isinstance(data, pa.Table) else table(data), path, row_group_size=group_rows, **options)
    return path


def refusal(path, *arguments, **options):
    with pytest.raises(InvalidInputError) as caught:
        ParquetSource.open(path, *arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
