"""Programs that import `mooncake.store` get this package, when asked for, and never by default."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from p2pstore.integrations import mooncake
from p2pstore.integrations.as_mooncake import install, uninstall
from tests.commands import ran

PROGRAM = """
import subprocess, sys
from mooncake.store import MooncakeDistributedStore
print(sys.argv[1], __name__, MooncakeDistributedStore.__module__, "/" in __file__)
if sys.argv[1] == "parent":
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_there_is_no_mooncake_by_default() -> None:
    assert importlib.util.find_spec("mooncake") is None


def test_install_makes_its_names_resolve() -> None:
    install()
    install()
    try:
        store = importlib.import_module("mooncake.store")
        assert store.MooncakeDistributedStore is mooncake.MooncakeDistributedStore
        assert store.ReplicateConfig is mooncake.ReplicateConfig
        later = importlib.import_module("mooncake.async_store")
        assert later.MooncakeDistributedStoreAsync is mooncake.MooncakeDistributedStoreAsync
        assert importlib.import_module("mooncake.buffer_pool").BufferPool is mooncake.BufferPool
        config = importlib.import_module("mooncake.mooncake_config").MooncakeConfig
        assert config is store.MooncakeConfig is mooncake.MooncakeConfig
        package = importlib.import_module("mooncake")
        assert package.__version__ == store.__version__ == mooncake.__version__
        assert (package.store, package.BufferPool) == (store, mooncake.BufferPool)
        spec = importlib.util.find_spec("mooncake.store")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("mooncake.store.anything")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("mooncake.engine")
    finally:
        uninstall()
    assert "mooncake" not in sys.modules


def test_mooncakes_own_store_is_not_replaced_behind_somebodys_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", importlib.util.module_from_spec(_SPEC))
    with pytest.raises(ImportError, match="already"):
        install()


_SPEC = importlib.machinery.ModuleSpec("mooncake.store", None)


def test_a_program_and_its_children_run_as_they_are(tmp_path: Path) -> None:
    """With Mooncake installed or not; its other modules stay, and a `sitecustomize` of the machine still runs."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "import mooncake.engine\nprint(mooncake.engine.WHICH)\n")
    theirs = tmp_path / "site" / "mooncake"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").write_text("raise SystemExit('the package itself is not imported')")
    (theirs / "engine.py").write_text("WHICH = 'their engine'")
    (theirs.parent / "sitecustomize.py").write_text("print('customized')")
    path = ":".join([str(theirs.parent), *(each for each in sys.path if each)])
    done = ran(
        [sys.executable, "-m", "p2pstore.integrations.as_mooncake", str(program), "parent"],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"},
    )
    assert done.stderr == ""
    ours = "p2pstore.integrations.mooncake.store"
    assert done.stdout.splitlines() == [
        "customized",
        f"parent __main__ {ours} True",
        "customized",
        f"child __main__ {ours} True",
        "their engine",
        "their engine",
    ]


def test_without_a_program_it_says_how_to_use_it() -> None:
    done = ran([sys.executable, "-m", "p2pstore.integrations.as_mooncake", "-m"])
    assert (done.returncode, done.stderr[:6]) == (1, "usage:")
