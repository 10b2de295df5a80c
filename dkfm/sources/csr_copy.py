"""Read CSR rows from a store that the driver writes for its workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dkfm.core.rows import Rows
from dkfm.sources.base import CsrRows
from dkfm.storage import csr


@dataclass(frozen=True)
class CsrCopySource(CsrRows):
    """CSR rows in a store, as three arrays with a common name."""

    array_prefix: str
    """Common name of the three arrays."""

    def read(self, rows: slice) -> Rows:
        """Return some rows."""
        return csr.read_csr(cast("Path", self.location), self.array_prefix, self.shape[1], rows)

    def is_unchanged(self, current_stamp: str) -> bool:  # only the driver writes this store
        """Return True: no other process writes the store."""
        return True
