"""`scripts/rdma_vm` without booting: options, what the VM is told, what is copied out, what is missing."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.commands import ran

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "rdma_vm"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("rdma_vm_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("rdma_vm_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    kept = list(sys.path)
    loader.exec_module(module)
    sys.path[:] = kept
    return module


@pytest.fixture
def image(script: ModuleType) -> Any:
    return sys.modules["rdma_vm_image"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, str(SCRIPT), *arguments], env={**os.environ, **environment})


def test_without_a_kernel_it_says_what_to_do(tmp_path: Path) -> None:
    done = run("true", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 125
    assert "run scripts/rdma_vm --set-up" in done.stderr
    assert done.stdout == ""
    assert run("--ready", XDG_CACHE_HOME=str(tmp_path)).returncode == 125


def test_what_the_vm_runs(script: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "a folder with 'quotes'"
    folder.mkdir()
    monkeypatch.chdir(folder)
    wanted = ["two words", "$HOME", "'", "*", ""]
    text = script.command_script(
        ["printf", "%s|", *wanted],
        {"HOME": "/somewhere", "P2PSTORE_X": "a 'b' $c", "SECRET": "s", "PYTEST_ADDOPTS": "-x"},
    )
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env={})
    assert done.stdout == "|".join([*wanted, ""])
    told = text.replace("exec printf", "env; pwd; exit 7; ")
    done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 7
    lines = done.stdout.splitlines()
    assert {"P2PSTORE_X=a 'b' $c", "PYTEST_ADDOPTS=-x", "P2PSTORE_RDMA_VM=1"} <= set(lines)
    assert lines[-1] == str(folder)
    assert "SECRET" not in text


def test_qemu_may_not_write_to_the_machines_files(
    script: ModuleType, image: Any, tmp_path: Path
) -> None:
    if image.find_tool("qemu-system-x86_64") is None:
        pytest.skip("qemu is not installed (scripts/rdma_vm --set-up)")
    options = script.parse_arguments(["--output", str(tmp_path), "true"])
    kernel = image.Image("6.1", tmp_path)
    command = script.qemu_command(kernel, tmp_path, tmp_path, options, {"stdout": 9})
    shared = [each for each in command if each.startswith("local,")]
    assert [each.endswith("readonly=on") for each in shared] == [True, True, False]
    assert f"path={tmp_path}," in shared[2]
    assert command[1:3] == ["--pdeathsig", "KILL"]
