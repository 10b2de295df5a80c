"""Tables whose description was changed, with the checksums that belong to it: what they claim is not believed."""

import json

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import DamagedStoreError
from dkfm.files.location import locate
from dkfm.scoring import marker, output_store


@pytest.fixture
def table(tmp_path, rng):
    """A finished table of predicted classes and decisions."""
    X = rng.normal(size=(40, 3))
    classifier = dkfm.KernelFisher(kernel=kernels.Gaussian(2.0)).fit(X, np.where(X[:, 0] > 0, "red", "white"))
    outputs = ["predict", "decision_function"]
    dkfm.batch_score(classifier, X, tmp_path / "scores.parquet", output=outputs, progress=False)
    return tmp_path / "scores.parquet"


def forge(table, change):
    """Change the attributes of a table, and the sum of its marker accordingly."""
    description, complete = table / "_dkfm.json", table / "_COMPLETE"
    content, columns = json.loads(description.read_text()), json.loads(complete.read_text())
    change(content["attributes"]["dkfm"])
    description.write_text(json.dumps(content))
    output = output_store.read_output(locate(table))
    columns["sum"] = marker._compute_digest(output, [columns[name] for name in ("crc32c", "invalid_rows", "bytes")])
    complete.write_text(json.dumps(columns))


READERS = [dkfm.verify_scores, lambda path: list(dkfm.iter_scores(path)), lambda path: dkfm.open_scores(path).compute()]


@pytest.mark.parametrize("read", READERS, ids=["verify", "iterate", "open"])
def test_columns_of_another_type_are_told(table, read):
    forge(table, lambda attributes: attributes["settings"].pop("predictions"))
    with pytest.raises(DamagedStoreError, match=r"Chunks? 0.* of .* (is|are) lost, or not what was written"):
        read(table)


@pytest.mark.parametrize("read", READERS[:2], ids=["verify", "iterate"])
def test_labels_that_are_no_classes_are_told(table, read):
    forge(table, lambda attributes: attributes.update(classes=["red", "rose"]))
    with pytest.raises(DamagedStoreError, match=r"Chunks? 0.* of .* (is|are) lost, or not what was written"):
        read(table)


def test_more_columns_than_a_table_has_are_not_named(table):
    with pytest.raises(DamagedStoreError, match="a number of columns"):
        forge(table, lambda attributes: attributes["outputs"][1].__setitem__(1, 2**47))
