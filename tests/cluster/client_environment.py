"""An environment that holds what `pip install p2pstore` brings and nothing else. For tests; no index is asked.

The wheel is built from this checkout. The libraries are those that its metadata names, as links to the files of the
environment in which the tests run: a library that the metadata forgets is missing there.
"""

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from tests.commands import ran

ROOT: Final = Path(__file__).parents[2]
SECONDS: Final = 300.0


def build(folder: Path) -> list[Path]:
    """The source distribution and, from it, the wheel. The checkout is copied: building leaves files in it."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    source = folder / "source"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    out = folder / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = ran(command, SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(out.iterdir())


def needed(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The distributions that installing `name` brings on this platform, itself included, by normalised name."""
    from packaging.requirements import Requirement  # of pytest
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    pending = [(canonicalize_name(name), extras)]
    while pending:
        each, wanted = pending.pop()
        if each in found:
            continue
        found.add(each)
        for line in distribution(each).requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in (*wanted, "")):
                pending.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def make_environment(folder: Path, wheel: Path) -> Path:
    """The environment's interpreter."""
    environment = folder / "environment"
    venv.create(environment, symlinks=True, with_pip=False)
    python = environment / "bin" / "python"
    packages = next((environment / "lib").glob("python3*/site-packages"))
    for name in needed("p2pstore") - {"p2pstore"}:
        found = distribution(name)
        for file in found.files or ():
            source, target = Path(str(found.locate_file(file))), packages / file
            if ".." not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, target) if source.stat().st_dev == packages.stat().st_dev else (
                    shutil.copyfile(source, target)
                )
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    done = ran([*command, "--no-deps", str(wheel)])
    assert done.returncode == 0, done.stdout + done.stderr
    return python
