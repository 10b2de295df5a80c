"""Draw the folders of dkfm and their imports, and list their modules in the page of the architecture.

python docs/draw_architecture.py           # writes the picture and the page anew
python docs/draw_architecture.py --check   # exits with 1 where one is out of date
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PICTURE = PAGE.with_suffix(".svg")
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["dkfm"]["folders"]
MARKED = re.compile(r"(<!-- modules: written by draw_architecture.py -->\n).*?(<!-- end -->)", re.S)
BOX = 176, 30
"""Width and height of a folder in the picture."""

STEP = 200, 56
"""Distance between the centres of neighbours, along and across."""


def path_of(folder):
    """Return the path of a folder of dkfm, or of the module `errors`."""
    path = ROOT / "dkfm" / Path(*folder.split("."))
    return path if path.is_dir() else path.with_suffix(".py")


def modules_of(folder):
    """Return the modules of a folder, without those of folders inside it."""
    path = path_of(folder)
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


def folder_of(module):
    """Return the folder of an imported name, None for what is not dkfm's."""
    name = module.removeprefix("dkfm.")
    while name and name not in FOLDERS:
        name = name.rpartition(".")[0]
    return name or None


def imported_folders(folder):
    """Return the folders that the modules of a folder import from."""
    found = set()
    for path in modules_of(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dkfm"):
                found |= {folder_of(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {folder, None}


def reduce_arrows(arrows):
    """Leave out each arrow that others lead to its end too."""
    reach = {}
    for folder in FOLDERS:  # what a folder imports comes before it
        reach[folder] = set().union(*({other} | reach[other] for other in arrows[folder])) if arrows[folder] else set()
    return {
        folder: {other for other in others if not any(other in reach[third] for third in others - {other})}
        for folder, others in arrows.items()
    }


def place_folders(arrows):
    """Return the centre of each folder: those that import nothing lie at the bottom, and all above what they import."""
    levels = {}
    for folder in FOLDERS:
        levels[folder] = 1 + max((levels[other] for other in arrows[folder]), default=-1)
    rows = [[folder for folder in FOLDERS if levels[folder] == level] for level in range(max(levels.values()) + 1)]
    width, height = max(map(len, rows)) * STEP[0], len(rows) * STEP[1]
    places = {}
    for level, row in enumerate(rows):
        for place, folder in enumerate(row):
            across = width / 2 + (place - (len(row) - 1) / 2) * STEP[0]
            places[folder] = across, height - (level + 0.5) * STEP[1]
    return places, (width, height)


def draw():
    """Return the picture as SVG: a box for each folder, and a line down to each folder that it imports from."""
    arrows = reduce_arrows({folder: imported_folders(folder) for folder in FOLDERS})
    places, (width, height) = place_folders(arrows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    ]
    lines += ["<title>The folders of dkfm, and which imports from which</title>"]
    lines += [f'<rect width="{width}" height="{height}" fill="white"/>']
    for folder, others in arrows.items():
        x, y = places[folder]
        for other in (other for other in FOLDERS if other in others):
            u, v = places[other]
            bend = (v - y) / 2
            path = f"M {x:g} {y:g} C {x:g} {y + bend:g}, {u:g} {v - bend:g}, {u:g} {v:g}"
            lines += [f'<path d="{path}" fill="none" stroke="#8a94a6" stroke-width="1.5"/>']
    for folder, (x, y) in places.items():
        left, top = x - BOX[0] / 2, y - BOX[1] / 2
        box = f'x="{left:g}" y="{top:g}" width="{BOX[0]}" height="{BOX[1]}" rx="6"'
        lines += [f'<rect {box} fill="#eef3fb" stroke="#41608f"/>']
        text = f'x="{x:g}" y="{y + 5:g}" text-anchor="middle" font-family="sans-serif" font-size="14"'
        lines += [f"<text {text}>{folder.replace('.', '/')}</text>"]
    return "\n".join([*lines, "</svg>", ""])


def summary(path):
    """Return the first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", text)[0].replace("|", r"\|")


def list_modules():
    """Return the modules of each folder with their first sentences."""
    lines = []
    for folder in FOLDERS[1:]:
        inner = [path for path in modules_of(folder) if path.stem != "__init__"]
        lines += [f"### {folder.replace('.', '/')}", "", summary(path_of(folder) / "__init__.py"), ""]
        lines += ["| module | |", "|---|---|", *(f"| `{path.stem}` | {summary(path)} |" for path in inner), ""]
    return "\n".join(lines) + "\n"


def page():
    """Return the page with the tables of modules written anew."""
    return MARKED.sub(lambda found: f"{found[1]}{list_modules()}{found[2]}", PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    new = {PAGE: page(), PICTURE: draw()}
    if "--check" in sys.argv and any(
        not path.exists() or path.read_text(encoding="utf-8") != text for path, text in new.items()
    ):
        sys.exit("The page of the architecture is out of date; run python docs/draw_architecture.py.")
    for path, text in new.items() if "--check" not in sys.argv else ():
        path.write_text(text, encoding="utf-8")
