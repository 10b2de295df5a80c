"""Kernels beside each other: figures against plain formulas, and the page in a browser."""

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import dkfm
from dkfm import kernels, plotting
from dkfm.cli import option_parsing
from dkfm.cli.app import main
from dkfm.errors import DkfmWarning
from dkfm.kernel_comparison import html_page
from dkfm.kernels.serialization import to_config
from helpers.browser import open_page
from helpers.compared_digits import K1, NAMES, Parsed

K2 = kernels.Polynomial(9, scale=1 / 1568, offset=0.5).warp(kernels.Affine(2, -1))


@pytest.mark.browser
def test_a_browser_shows_the_page_and_has_nothing_to_complain_of(text, tmp_path):
    (tmp_path / "page.html").write_text(text)
    with open_page((tmp_path / "page.html").as_uri(), 1200, 1600) as (page, complaints):
        parsed, picture = Parsed(page.content()), page.screenshot()
    assert complaints == []
    assert len(parsed.of("img")) == 4 * len(NAMES)
    assert "wide <b>&" in parsed.cells
    from matplotlib.image import imread

    shot = imread(io.BytesIO(picture))
    assert shot.shape[:2] == (1600, 1200)
    halves = shot[:300, :, :3], shot[400:, :, :3]  # the table; the pictures
    assert min(half.std() for half in halves) > 0.05
    assert (np.ptp(halves[1], axis=2) > 0.3).mean() > 0.002  # some colours


@pytest.mark.browser
def test_a_browser_that_has_to_complain_is_heard(tmp_path):
    text = html_page.render_page([], [["a"]], [])
    (tmp_path / "page.html").write_text(text.replace("</body>", "<script>1</script><img src='http://x/y'></body>"))
    with open_page((tmp_path / "page.html").as_uri()) as (_, complaints):
        assert len(complaints) >= 2


@pytest.mark.browser
def test_the_page_is_no_wider_than_a_phone(text, tmp_path):
    (tmp_path / "page.html").write_text(text)
    with open_page((tmp_path / "page.html").as_uri(), 390, 800) as (page, _):
        wide, visible = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        broken = page.evaluate("[...document.images].filter(image => !image.naturalWidth).length")
    assert wide <= visible <= 390
    assert broken == 0


@pytest.mark.parametrize(
    ("word", "kernel"),
    [
        ("linear", kernels.Linear()),
        ("gaussian:sigma=5", kernels.Gaussian(5.0)),
        ("gaussian:sigma=median", kernels.Gaussian("median")),
        ("gaussian:sigma=1,2,3", kernels.Gaussian((1.0, 2.0, 3.0))),
        ("polynomial:degree=9,scale=1/784", K1),
        ("polynomial:degree=2,scale=0.5,offset=1", kernels.Polynomial(2, 0.5, 1.0)),
        (json.dumps(to_config(K2)), K2),
    ],
)
def test_kernels_are_words(word, kernel):
    assert option_parsing.parse_kernel(word) == kernel


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("gaussian:sigma=", "NAME=VALUE"),
        ("gaussian:=1", "NAME=VALUE"),
        ("gausian:sigma=1", "near it: gaussian"),
        ("gaussian:sigma=1/0", "1/0"),
        ("gaussian:width=1", "has the parameter sigma"),
        ("{", "no kernel in JSON"),
        ('{"name": "nothing"}', "no kernel named 'nothing'"),
        ('{"name": "function", "function": {"function": "os:system", "source": ""}}', "os:system"),
        ("no_such_module:kernel", "cannot be imported"),
    ],
)
def test_a_word_that_is_no_kernel_is_told(word, error):
    result = CliRunner().invoke(main, ["compare", "x.npy", "--labels", "y.npy", "--kernel", word])
    assert result.exit_code in (1, 2)
    assert error in result.stderr
    assert "Traceback" not in result.output


@pytest.fixture
def folder(tmp_path, monkeypatch, rows):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    X, y, Z, t = rows
    for name, values in (("x", X), ("y", y), ("z", Z), ("t", np.array([f"digit {label}" for label in t]))):
        np.save(f"{name}.npy", values)
    Path("papers_kernels.py").write_text(
        "from dkfm import kernels\n"
        "k2 = kernels.Polynomial(9, scale=1/1568, offset=0.5).warp(kernels.Affine(2, -1))\n"
        "def plain(X, Y):\n    return X @ Y.T\n"
    )
    yield tmp_path
    sys.modules.pop("papers_kernels", None)


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_the_page(folder, found):
    words = ["--kernel", "gaussian:sigma=20", "--kernel", "papers_kernels:k2", "--kernel", "papers_kernels:plain"]
    line = ["compare", "x.npy", "--labels", "y.npy", "--test", "z.npy", "--test-labels", "t.npy", *words]
    result = CliRunner().invoke(main, [*line, "--html", "page.html"])
    assert result.exit_code == 0, result.output
    header, wide, k2, plain = result.stdout.splitlines()[1:5]
    assert header.split()[:3] == ["kernel", "rank", "condition"]
    assert wide.split()[0] == "Gaussian(sigma=20.0)"
    assert repr(K2) in k2
    assert "Function(plain)" in plain
    assert len(Parsed(Path("page.html").read_text()).of("img")) == 4 * 3
    result = CliRunner().invoke(main, [*line[:-4], "--json"])
    read = json.loads(result.stdout)
    kept = {"rank": 0, "condition": 0, "1-NN_accuracy": 0, "Fisher_accuracy": 0}.keys()
    assert [{key: value for key, value in one.items() if key in kept} for one in read["kernels"]][:1] == [
        {key: value for key, value in found.compared[0].to_table_row().items() if key in kept}
    ]


def test_the_command_says_what_is_wrong_with_its_files(folder):
    def run(*words):
        return CliRunner().invoke(main, ["compare", *words, "--kernel", "linear"])

    np.save("objects.npy", np.array([None, "a"], dtype=object), allow_pickle=True)
    Path("archive.npy").write_bytes(b"PK\x03\x04 and no more")
    for words, said in (
        (["x.npy", "--labels", "archive.npy"], "--labels takes a .npy file"),
        (["x.npy", "--labels", "y.npy", "--html", "none/page.html"], "its folder is not there"),
        (["x.npy", "--labels", "y.npy", "--html", "."], "it is a folder"),
        (["none.npy", "--labels", "y.npy"], "There is no"),
        (["x.npy", "--labels", "none.npy"], "There is no none.npy"),
        (["x.npy", "--labels", "objects.npy"], "--labels takes a .npy file"),
        (["x.npy", "--labels", "t.npy"], "t.npy has the shape (100,), and must have 200 rows"),
    ):
        result = run(*words)
        assert result.exit_code == 1
        assert said in result.stderr
    assert run("x.npy").exit_code == 2
    for words in (["--test", "z.npy"], ["--test-labels", "t.npy"]):
        result = run("x.npy", "--labels", "y.npy", *words)
        assert (result.exit_code, "belong together" in result.stderr) == (2, True)


def test_columns_of_a_table_are_taken_by_name_on_both_sides(folder, rows):
    pd = pytest.importorskip("pandas", reason="the extra dataframe brings it")
    frame = pd.DataFrame(rows[0][:, :4], columns=list("abcd"))
    frame.assign(id=np.arange(200), label=np.arange(200) % 3).to_parquet("train.parquet")
    frame[["d", "a", "c", "b"]].to_parquet("test.parquet")
    np.save("marks.npy", rows[1])
    words = ["--labels", "marks.npy", "--test-labels", "marks.npy", "--kernel", "gaussian:sigma=3", "--json"]
    tables = ["train.parquet", "--test", "test.parquet", "--columns", "a,b,c,d"]
    result = CliRunner().invoke(main, ["compare", *tables, *words])
    found = json.loads(result.stdout)["kernels"][0]
    expected = dkfm.compare_kernels([kernels.Gaussian(3.0)], frame, rows[1], test=frame, test_labels=rows[1])
    assert found["Fisher_accuracy"] == expected.compared[0].fisher_accuracy
    assert found["rank"] == expected.compared[0].rank


@pytest.mark.slow
def test_labels_that_matplotlib_would_read_otherwise_are_drawn_as_they_are(rows):
    X, y, Z, t = rows
    names = np.array(["$\\bad{$", "_hidden", "$x$"])
    codes = np.unique(y, return_inverse=True)[1]
    found = dkfm.compare_kernels([kernels.Linear()], X, names[codes], test=Z, test_labels=names[t])
    assert found.to_html().count("<img") >= 2
    ax = plotting.components(X[:, :2], names[codes])
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [r"\$\bad{\$", r"\$x\$", " _hidden"]


@pytest.mark.slow
def test_a_kernel_without_discriminants_and_names_that_come_twice_leave_a_page():
    X, y = np.array([[0.0], [1.0]] * 12), np.array([0, 0, 1, 1] * 6)
    with pytest.warns(DkfmWarning, match="the priors alone decide"):
        found = dkfm.compare_kernels([kernels.Linear(), "nope", "nope"], X, y, test=X, test_labels=y)
    assert list(found.refused) == ["'nope'", "'nope' (2)"]
    assert "Fisher discriminants of" not in found.to_html()


@pytest.mark.slow
def test_the_papers_comparison_is_the_table_of_its_page(mnist_247_labelled):
    X, y, Z, t = mnist_247_labelled
    found = dkfm.compare_kernels({"k1": K1, "k2": K2}, X, y, test=Z, test_labels=t, shrinkage=1e-3)
    assert (len(X), len(Z)) == (1500, 1482)
    text = (Path(__file__).parents[2] / "docs" / "user_guide" / "comparing_kernels.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| (k[12]) \| (.*) \|$", text, re.M))
    header = re.search(r"^\| kernel of the paper \| (.*) \|$", text, re.M)[1].split(" | ")
    for one in found.compared:
        texts = found.table.format_cells()
        shown = dict(zip(texts[0], texts[1 + ["k1", "k2"].index(one.name)], strict=True))
        for name, value in zip(header, told[one.name].split(" | "), strict=True):
            measured = float(shown[name].replace(",", ""))
            # A condition is as exact as its smallest eigenvalue, some 1e-7 of k1's; figures have three digits.
            assert float(value.replace(",", "")) == pytest.approx(measured, rel=0.01), name
    k1, k2 = found.compared
    assert k2.fisher_accuracy >= 0.97
    assert k1.fisher_accuracy < k2.fisher_accuracy - 0.05
