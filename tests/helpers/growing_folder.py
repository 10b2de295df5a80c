"""A folder of Parquet files that grows, is scored into one output, and knows what should be there."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dkfm
from dkfm import kernels

NAMES = ["a", "b", "c"]


class GrowingFolder:
    """A folder of Parquet that grows, and the rows in the order in which they came."""

    def __init__(self, root):
        self.root, self.rows, self.rng = Path(root), np.zeros((0, 3)), np.random.default_rng(7)
        pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0))
        self.pca = pca.fit(pa.table(dict(zip(NAMES, self.rng.normal(size=(3, 30)), strict=True))))
        self.pca.save(self.root / "model")

    def add(self, **files):
        """Add files of so many rows, in the order of their names."""
        for name, rows in sorted(files.items()):
            values = self.rng.normal(size=(rows, 3))
            ids = [f"row {len(self.rows) + number}" for number in range(rows)]
            path = self.root / "in" / f"{name.replace('__', '/')}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"id": ids} | dict(zip(NAMES, values.T, strict=True))), path, row_group_size=4)
            self.rows = np.concatenate([self.rows, values])
        return self

    def score(self, output="out", **options):
        options = {"append": True, "chunk_rows": 10, "progress": False} | options
        return dkfm.batch_score(self.root / "model", self.root / "in", self.root / output, **options)

    def check(self, output="out"):
        """Check all rows, in their order, and that the output is verified against its input."""
        scores = dkfm.open_scores(self.root / output).compute()
        expected = self.pca.transform(pa.table(dict(zip(NAMES, self.rows.T, strict=True))))
        if output.endswith(".parquet") and "id" in scores:
            assert scores.pop("id").tolist() == [f"row {n}" for n in range(len(self.rows))]
        if not output.endswith(".parquet") and (self.root / output / "id").exists():
            ids = np.concatenate([ids for _, ids in dkfm.iter_scores(self.root / output)])
            assert ids.tolist() == [f"row {n}" for n in range(len(self.rows))]
        np.testing.assert_allclose(np.asarray(scores), expected, rtol=1e-10, atol=1e-12)
        found = dkfm.verify_scores(self.root / output, self.root / "in")
        assert (found.rows, found.sampled) == (len(self.rows), len(self.rows))
