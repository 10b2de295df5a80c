"""Draw the folders of dkfm and their imports, and list their modules, into architecture.md.

python docs/draw_architecture.py           # writes the page anew
python docs/draw_architecture.py --check   # exits with 1 where the page is out of date
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dkfm"]["folders"]
MARKED = re.compile(r"(<!-- (picture|modules): drawn by draw_architecture.py -->\n).*?(<!-- end -->)", re.S)


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
        for node in ast.walk(ast.parse(path.read_text())):
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


def draw():
    """Return the picture as a Mermaid flow chart."""
    names = {folder: folder.replace(".", "_") for folder in FOLDERS}
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {names[folder]}[{folder.replace('.', '/')}]" for folder in FOLDERS]
    for folder, others in reduce_arrows({folder: imported_folders(folder) for folder in FOLDERS}).items():
        lines += [f"    {names[folder]} --> {names[other]}" for other in FOLDERS if other in others]
    return "\n".join([*lines, "```", ""])


def summary(path):
    """Return the first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
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
    """Return the page with both parts drawn anew."""
    parts = {"picture": draw(), "modules": list_modules()}
    return MARKED.sub(lambda found: f"{found[1]}{parts[found[2]]}{found[3]}", PAGE.read_text())


if __name__ == "__main__":
    new = page()
    if "--check" in sys.argv and new != PAGE.read_text():
        sys.exit("docs/architecture.md is out of date; run python docs/draw_architecture.py.")
    PAGE.write_text(new)
