"""Define the commands for the demo, the benchmark, and the comparison of kernels."""

from pathlib import Path
from typing import Literal

import click

from dkfm.cli import option_parsing
from dkfm.cli.logging_options import add_logging_options, print_summary
from dkfm.core.display.terminal_output import print_json, print_result
from dkfm.errors import InvalidInputError


@click.command()
@click.option("--rows", type=click.IntRange(min=1), default=200_000, show_default=True, help="Number of rows to score.")
@click.option("--dir", "directory", default="dkfm-demo", show_default=True, help="Folder for the files of the demo.")
@add_logging_options
def demo(rows: int, directory: str) -> None:
    """Fit and score scikit-learn's handwritten digits on a local Dask cluster."""
    from dkfm.cli.demo import run_demo

    run_demo(directory, rows, print_summary)


@click.command()
@click.option(
    "--quick", is_flag=True, help="Use smaller sizes: two minutes instead of ten or more, or 20 seconds with --kernels."
)
@click.option(
    "--kernels", is_flag=True, help="Measure only the time per value of each kernel and of its plain formula."
)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
@click.option(
    "--scheduler", metavar="ADDRESS", help="Dask cluster, as for dkfm score. [a cluster of processes on this machine]"
)
@option_parsing.WAIT_FOR_WORKERS
def bench(quick: bool, kernels: bool, as_json: bool, scheduler: str | None, wait_for_workers: float | None) -> None:
    """Measure the speed of dkfm on this machine, compared with scikit-learn and with the arithmetic alone."""
    from dkfm.bench import kernel_values, run

    option_parsing.require_scheduler(scheduler, wait_for_workers)
    if kernels and scheduler is not None:
        raise click.UsageError("--kernels measures one thread of this process, and takes no --scheduler.")
    say = (lambda _: None) if as_json else print_result
    if kernels:
        report = kernel_values.run_kernel_benchmark(kernel_values.QUICK if quick else kernel_values.FULL, say)
    else:
        report = run.run_benchmarks(run.QUICK if quick else run.FULL, scheduler, say, wait_for_workers)
    if as_json:
        print_json(report)


@click.command()
@click.argument("train", type=click.Path())
@click.option("--labels", metavar="Y.NPY", help="A .npy file with one class label for each row of TRAIN.")
@click.option("--label-column", metavar="NAME", help="Column of TRAIN and TEST with the labels, instead of --labels.")
@click.option(
    "--kernel",
    "specs",
    multiple=True,
    required=True,
    metavar="KERNEL",
    help="Kernel to compare, as described above. Repeat it for each kernel.",
    shell_complete=option_parsing.complete_kernel_name,
)
@click.option("--columns", metavar="NAMES", help="Table columns, comma-separated. [all but ids and labels]")
@click.option("--exclude-columns", metavar="NAMES", help="Columns that are not features, instead of --columns.")
@click.option("--id-column", metavar="NAME", help="Column of a table with ids, which is not a feature.")
@click.option("--standardize", is_flag=True, help="Scale each column to (x - mean) / scale.")
@click.option(
    "--shrinkage",
    callback=option_parsing.parse_shrinkage,
    metavar="NUMBER",
    default="auto",
    help="Shrinkage of the Fisher discriminants, or auto, which selects it for each kernel. [auto]",
)
@click.option(
    "--on-indefinite",
    type=click.Choice(["raise", "clip"]),
    default="raise",
    help="Action for a kernel that is not positive semi-definite: raise leaves it out, clip drops its negative part. "
    "[raise]",
)
@click.option("--sample", metavar="N", type=click.IntRange(min=1), help="Use N rows of TRAIN, drawn at random. [all]")
@click.option("--test", metavar="TEST", help="Test rows. [a quarter of TRAIN]")
@click.option("--test-labels", metavar="Y.NPY", help="A .npy file with one class label for each row of TEST.")
@click.option("--html", metavar="PAGE", help="Write an HTML page with plots to this file. t-SNE needs the extra tsne.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@add_logging_options
def compare(
    train: str,
    labels: str | None,
    label_column: str | None,
    specs: tuple[str, ...],
    columns: str | None,
    exclude_columns: str | None,
    id_column: str | None,
    standardize: bool,
    shrinkage: float | Literal["auto"],
    on_indefinite: Literal["raise", "clip"],
    sample: int | None,
    test: str | None,
    test_labels: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Measure how well each kernel separates the labelled rows of TRAIN; print a table and, with --html, write a page.

    A KERNEL is a name with its parameters after a colon, such as gaussian:sigma=5 or polynomial:degree=9,scale=1/784;
    module:name of your own kernel or function f(X, Y); or JSON, as dkfm info prints the kernel of a model.
    """
    from dkfm.files.location import locate, require_disjoint
    from dkfm.kernel_comparison.compare import compare_kernels
    from dkfm.sources.base import NamedColumns
    from dkfm.sources.opening import open_source

    _require_consistent_labels(labels, label_column, test, test_labels)
    option_parsing.require_one_choice_of_columns(columns, exclude_columns)
    option_parsing.require_no_features(columns, id_column=[id_column], label_column=[label_column])
    kernels = [option_parsing.parse_kernel(spec) for spec in specs]
    if html is not None:
        _require_page(Path(html))
    excluded = [*([label_column] if label_column else []), *(option_parsing.parse_list(exclude_columns) or [])]
    features = option_parsing.parse_list(columns)
    rows = open_source(train, columns=features, id_column=id_column, excluded_columns=excluded)
    option_parsing.require_table(exclude_columns, isinstance(rows, NamedColumns), train)
    option_parsing.log_features(rows)
    if html is not None:
        files = [Path(path) for path in (labels, test_labels) if path is not None]
        held_out_place = None if test is None else locate(test)
        require_disjoint(Path(html).absolute(), "page", [rows.location, held_out_place, *files])
    names = list(rows.columns) if isinstance(rows, NamedColumns) else None
    if names is not None and features is None:
        option_parsing.warn_of_ids(names, id_column)
    if label_column is not None and names is None:
        raise InvalidInputError(f"--label-column names a column of a table, and {train} is none; use --labels.")
    held_out = None if test is None else open_source(test, "test", columns=names)
    y = label_column if labels is None else option_parsing.read_labels(labels, "--labels", rows.shape[0])
    t = None
    if test_labels is not None and held_out is not None:
        t = option_parsing.read_labels(test_labels, "--test-labels", held_out.shape[0])
    result = compare_kernels(
        kernels,
        rows,
        y,
        test=held_out,
        test_labels=t,
        shrinkage=shrinkage,
        on_indefinite=on_indefinite,
        standardize=standardize,
        embedding=html is not None,
        sample=sample,
    )
    if not as_json:
        print_result(*str(result).splitlines())
    if html is not None:
        result.save_page(html)
    if as_json:  # last, so that an error of the page is printed instead
        print_result(*result.to_json().splitlines())


def _require_consistent_labels(
    labels: str | None, label_column: str | None, test: str | None, test_labels: str | None
) -> None:
    """Raise a usage error unless the labels of TRAIN are given once, and those of TEST in the same way."""
    if (labels is None) == (label_column is None):
        raise click.UsageError("dkfm compare takes --labels, or --label-column of a table; one of them.")
    if label_column is not None and test_labels is not None:
        raise click.UsageError("--test-labels belongs to --labels; with --label-column TEST has that column too.")
    if labels is not None and (test is None) != (test_labels is None):
        raise click.UsageError("--test and --test-labels belong together; give both or none.")


def _require_page(page: Path) -> None:
    """Raise unless a page with plots can be written."""
    from dkfm.files import local
    from dkfm.kernel_comparison import html_page
    from dkfm.plotting.axes import import_pyplot

    import_pyplot()
    local.require_parent_folder(page)
    html_page.require_replaceable_page(page.resolve())
