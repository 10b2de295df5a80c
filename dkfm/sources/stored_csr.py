"""CSR rows in a store of dkfm's, which a driver writes for its workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dkfm.core.rows import Rows
from dkfm.sources.base import CsrRows
from dkfm.storage import csr


@dataclass(frozen=True)
class StoredCsr(CsrRows):
    """CSR rows in a store: three arrays with a common name."""

    array: str

    def read(self, rows: slice) -> Rows:
        """Return some rows."""
        return csr.read_csr(cast("Path", self.location), self.array, self.shape[1], rows)

    def is_of(self, stamp: str) -> bool:  # the store is the driver's own
        """Return True: nobody else writes there."""
        return True
