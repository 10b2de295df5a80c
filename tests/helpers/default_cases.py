"""Choose the cases of parametrized tests that a short suite runs; the slow suite or the campaign runs the others."""

from collections import defaultdict


def list_left_out_cases(cases):
    """Return the cases, of any parametrized tests, that `select_cases` leaves out of their tests."""
    tests = defaultdict(list)
    for case in cases:
        tests[case.nodeid.partition("[")[0]].append(case)
    selected = {case for of_one_test in tests.values() for case in select_cases(of_one_test)}
    return [case for case in cases if case not in selected]


def select_cases(cases):
    """Return cases of one test: one if they are costly, every third if they are alike, else each value in one of them.

    Parameters that one decorator gives together are one value. A case with more new values comes before one with fewer.
    """
    if cases[0].get_closest_marker("costly"):
        return cases[:1]
    if cases[0].get_closest_marker("alike"):
        return cases[::3]
    values = {case: _list_values(case) for case in cases}
    missing, selected = set().union(*values.values()), []
    while missing:
        selected.append(max(cases, key=lambda case: len(values[case] & missing)))
        missing -= values[selected[-1]]
    return selected


def _list_values(case):
    """Return the values of a case by their identities: combinations of one test share them."""
    parameters = case.callspec.params
    names = [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [given.replace(",", " ").split() if isinstance(given, str) else list(given) for given in names]
    alone = [[name] for name in parameters if not any(name in group for group in together)]
    return {(*group, *(id(parameters[name]) for name in group)) for group in together + alone}
