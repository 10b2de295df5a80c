"""Check arguments that users give."""

import numpy as np

from dkfm.errors import InvalidInputError


def require_flags(**flags: object) -> None:
    """Raise an InvalidInputError that names the first argument whose value is neither True nor False.

    >>> require_flags(append=False, overwrite="no")
    Traceback (most recent call last):
        ...
    dkfm.errors.InvalidInputError: overwrite must be True or False, and is 'no'.
    """
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise InvalidInputError(f"{name} must be True or False, and is {value!r:.60}.")
