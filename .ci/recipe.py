"""Write the recipe of conda-forge for a source distribution: `python .ci/recipe.py dkfm-0.1.0.tar.gz recipe.yaml`.

Names and ranges are those of pyproject.toml, so that there is no second list of them.
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

SETTINGS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
PROJECT, BUILD = SETTINGS["project"], SETTINGS["build-system"]["requires"][0]

RECIPE = """\
schema_version: 1

context:
  version: "{version}"
  python_min: "{python}"

package:
  name: dkfm
  version: ${{{{ version }}}}

source:
  url: https://pypi.org/packages/source/d/dkfm/dkfm-${{{{ version }}}}.tar.gz
  sha256: {sha256}

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
      - dkfm = {command}

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
    - {build}
  run:
    - python >=${{{{ python_min }}}}
{run}

tests:
  - python:
      imports:
        - dkfm
      python_version:
        - ${{{{ python_min }}}}.*
        - "*"
      pip_check: true
  - script:
      - dkfm --help
    requirements:
      run:
        - python ${{{{ python_min }}}}.*

about:
  homepage: {homepage}
  repository: {homepage}
  documentation: {documentation}
  license: {license}
  license_file: LICENSE
  summary: "{summary}"

extra:
  recipe-maintainers:
    - dkfm
"""


def translate(requirement: str) -> list[str]:
    """Return the requirements of conda-forge for one of pip."""
    name, extras, bounds = re.fullmatch(r"([\w-]+)(\[[\w,-]+\])?(.*)", requirement).groups()
    if name == "dask":  # the extras that are asked for are packages of their own there
        assert set(extras.strip("[]").split(",")) == {"array", "distributed", "diagnostics"}
        return [f"dask-core {bounds}", f"distributed {bounds}", "bokeh >=3.1"]
    assert extras is None, requirement
    return [f"{name} {bounds}"]


def main(sdist: str, recipe: str) -> None:
    run = [line for requirement in PROJECT["dependencies"] for line in translate(requirement)]
    text = RECIPE.format(
        version=PROJECT["version"],
        python=PROJECT["requires-python"].removeprefix(">="),
        sha256=hashlib.sha256(Path(sdist).read_bytes()).hexdigest(),
        command=PROJECT["scripts"]["dkfm"],
        build=BUILD,
        run="\n".join(f"    - {line}" for line in run),
        homepage=PROJECT["urls"]["Homepage"],
        documentation=PROJECT["urls"]["Documentation"],
        license=PROJECT["license"],
        summary=PROJECT["description"],
    )
    Path(recipe).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
