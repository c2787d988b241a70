"""Who may import whom, and what an import costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
#: What the packer may know of the readers: the contract, and what both halves must do alike.
SHARED = {"layout", "info", "manifest", "system", "errors", "handles", "imaging", "lmdb_pages"}
#: What a training job must not be made to load; and what each half may load only when it works with it.
HEAVY = ("torch", "h5py", "lmdb", "torchvision", "matplotlib", "tqdm", "click", "simplejpeg")


def modules(package: str) -> list[Path]:
    found = sorted((REPOSITORY / package).rglob("*.py"))
    assert len(found) > 5
    return found


def imported(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything a module imports, wherever in it; ``a.b`` for ``from a import b``."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    package = parts[:-1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            first = node.args[0]
            assert not (isinstance(first, ast.Constant) and str(first.value).startswith("packer")), path


@pytest.mark.parametrize("path", modules("readers"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_readers_never_imports_packer(path: Path) -> None:
    assert not [name for name in imported(path) if name.split(".")[0] == "packer"]


@pytest.mark.parametrize("path", modules("packer"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_packer_imports_no_torch_and_only_the_shared_part_of_readers(path: Path) -> None:
    names = [name.split(".") for name in imported(path)]
    assert not [name for name in names if name[0] in ("torch", "torchvision")]
    assert {name[1] for name in names if name[0] == "readers"} <= SHARED


@pytest.mark.parametrize(
    "path", [*modules("readers"), *modules("packer")], ids=lambda p: str(p.relative_to(REPOSITORY))
)
def test_every_module_lists_its_public_names_first(path: Path) -> None:
    if path.name == "__main__.py":
        return
    tree = ast.parse(path.read_bytes())
    assert ast.get_docstring(tree), "a module says what it is for"
    defined = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign)
    ]
    if not defined:
        return  # a package that only holds modules
    first = defined[0]
    assert isinstance(first, ast.Assign)
    assert ast.unparse(first.targets[0]) == "__all__"
    names = ast.literal_eval(first.value)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("package", ["readers", "packer"])
def test_every_public_name_exists(package: str) -> None:
    for path in modules(package):
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__"):
            module = importlib.import_module(name)
            assert [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)] == []


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


LIGHT = (
    "import readers",
    "from readers import Manifest, ManifestError, ReaderError, ShardCorruptError, UnfinishedSetError",
    "import readers.layout, readers.manifest, readers.errors, readers.handles, readers.imaging, readers.shards",
    "from readers.verify import verify",
)


@pytest.mark.parametrize("statement", LIGHT)
def test_light_parts_of_readers_load_nothing_heavy(statement: str) -> None:
    loaded = run(f"{statement}\nimport sys; print(*(name for name in {HEAVY!r} if name in sys.modules))").split()
    assert loaded == []


@pytest.mark.slow  # imports torch in a new process
def test_dataset_loads_torch_and_no_container_library() -> None:
    loaded = run(f"from readers import ShardDataset\nimport sys; print(*(n for n in {HEAVY!r} if n in sys.modules))")
    assert set(loaded.split()) & {"torch", "h5py", "lmdb", "torchvision", "matplotlib", "click"} == {"torch"}


def test_packer_loads_no_torch() -> None:
    assert run("import packer, packer.cli, sys; print('torch' in sys.modules)").strip() == "False"


def test_import_does_no_work() -> None:
    """No environment read or written, no logging set up, no seeds, no warnings filters, no start method, no threads."""
    code = """
import logging, os, random, sys, threading, warnings
import numpy, PIL.Image
before = (dict(os.environ), list(logging.root.handlers), random.getstate(), list(warnings.filters),
          PIL.Image.MAX_IMAGE_PIXELS, threading.active_count(), os.getcwd(), warnings.showwarning)
import packer, packer.cli, readers, readers.handles, readers.imaging, readers.decode, readers.verify, readers.info
after = (dict(os.environ), list(logging.root.handlers), random.getstate(), list(warnings.filters),
         PIL.Image.MAX_IMAGE_PIXELS, threading.active_count(), os.getcwd(), warnings.showwarning)
assert before == after
"""
    run(code)


def test_unknown_name_is_an_attribute_error() -> None:
    import readers

    with pytest.raises(AttributeError, match="module 'readers' has no attribute 'ShardDatset'"):
        _ = readers.ShardDatset
    assert dir(readers) == sorted(readers.__all__)
