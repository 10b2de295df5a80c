"""What the tests of scoring share."""

from functools import partial

import dkfm
from dkfm.scoring import output_store
from dkfm.scoring.formats import chunk_files


def score(job, **options):
    return dkfm.batch_score(*job, progress=False, **options)


def write(output, number, values, n_pieces=1):
    """Write one chunk of an output of one array, as its task does."""
    pieces = (chunk_files.Piece({"scores": part}) for part in values)
    still = partial(output_store.require_not_replaced, output.root, output.creation_id)
    return chunk_files.write_chunk_files(output.format, output.chunk(number), pieces, n_pieces, still)
