"""What `scripts/rdma_vm` boots: packages of the distribution, a kernel, a small initial file system.

The kernel and the file system are kept in the user's cache, the distribution's pyverbs is linked into
`.venv`. Debian's stock kernel is taken, because its cloud flavour, and the kernel of many hosts, lack soft-RoCE.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INIT = Path(__file__).with_name("rdma_vm_init")
VENV = ROOT / ".venv"
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "modprobe": "kmod",
    "cpio": "cpio",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "rdma": "iproute2",
}
"""Commands that are used here or in the VM, and the Debian packages that bring them."""
BENCHMARK_TOOLS = {"ib_read_bw": "perftest"}
"""Set up as well; all but a benchmark works without."""
LIBRARIES = ("python3-pyverbs", "ibverbs-providers")
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console"),
    "crc32_generic",  # rxe asks for it by name: without it no device can be made (ENOENT)
    *("ib_uverbs", "rdma_rxe", "rdma_ucm", "veth"),
)
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class NotPossible(Exception):
    """The VM cannot be set up or run here; the text says what to do."""


@dataclass(frozen=True)
class Image:
    """A kernel and an initial file system to boot."""

    version: str
    folder: Path

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initial(self) -> Path:
        return self.folder / f"initramfs-{_recipe()}.gz"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "p2pstore" / "rdma_vm"


def find_tool(name: str) -> str | None:
    """The path of a command, also of those that only root has in its PATH."""
    return shutil.which(name, path=SEARCH_PATH)


def ready_image() -> Image:
    """The image that was set up, built anew where its sources changed. Raises `NotPossible` when something is
    missing."""
    missing = missing_packages(TOOLS)
    image = _image_in_cache()
    if missing or image is None or not pyverbs_link().exists():
        what = f"missing packages: {' '.join(missing)}" if missing else "it was not set up"
        raise NotPossible(f"the RDMA VM cannot run yet ({what}): run scripts/rdma_vm --set-up")
    if not image.initial.exists():
        with _lock():
            if not image.initial.exists():
                _build_initial(image)
    return image


def set_up() -> Image:
    """Install, download, build and link what is missing; nothing when all is there. Raises `NotPossible`."""
    if not missing_packages(TOOLS | BENCHMARK_TOOLS):
        with contextlib.suppress(NotPossible):
            return ready_image()
    if os.uname().machine != "x86_64":
        raise NotPossible(f"the RDMA VM is for x86-64 only; this machine is {os.uname().machine}")
    with _lock():
        _install_packages()
        if _image_in_cache() is None:
            _download_kernel(cache_folder())
        _link_pyverbs()
    return ready_image()


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One at a time: the second finds all done."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(f"rdma_vm: {text}", file=sys.stderr, flush=True)


# --- packages --------------------------------------------------------------------------------


def missing_packages(tools: Mapping[str, str]) -> list[str]:
    """Debian names of what is not installed, of these tools and what is used besides."""
    missing = {package for tool, package in tools.items() if find_tool(tool) is None}
    missing.update(name for name in LIBRARIES if not _package_installed(name))
    return sorted(missing)


def _package_installed(name: str) -> bool:
    if find_tool("dpkg-query") is None:
        return False
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", name]
    asked = subprocess.run(query, capture_output=True, text=True, check=False)
    return asked.stdout == "installed"


def _install_packages() -> None:
    missing = missing_packages(TOOLS | BENCHMARK_TOOLS)
    if find_tool("apt-get") is None:
        raise NotPossible(
            "the RDMA VM is made of Debian packages, and this machine has no apt-get: use Debian 12 "
            "(a container of it will do)"
        )
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise NotPossible(
            "missing packages. Install them and run this again:\n"
            f"  sudo apt-get update && sudo {shlex.join(install)}"
        )
    say(f"installing {' '.join(missing)}")
    _run(["apt-get", "update"])
    _run(install)


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    """Run a command to its end; what it printed. Raises `NotPossible` with the end of that when it fails."""
    environment = {**os.environ, "PATH": SEARCH_PATH, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        raise NotPossible(f"{shlex.join(command)} failed ({done.returncode}):\n{tail}")
    return done.stdout


# --- kernel ----------------------------------------------------------------------------------


def _image_in_cache() -> Image | None:
    current = cache_folder() / "current"
    return Image(current.resolve().name, current.resolve()) if current.is_dir() else None


def _download_kernel(cache: Path) -> None:
    """The kernel that Debian would install now, unpacked."""
    lines = _run(["apt-cache", "depends", "--important", "linux-image-amd64"]).splitlines()
    names = [line.split(": ")[1] for line in lines if "Depends: linux-image-" in line]
    if not names:
        raise NotPossible(
            "apt knows no linux-image-amd64: run apt-get update; on another distribution, use Debian 12"
        )
    version = names[0].removeprefix("linux-image-")
    fresh = cache / f"{version}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    say(f"downloading {names[0]} (some 70 MB)")
    # As root, apt would download as a user who may not write here.
    _run(["apt-get", "-o", "APT::Sandbox::User=root", "download", names[0]], fresh)
    (package,) = fresh.glob("*.deb")
    _run(["dpkg-deb", "--extract", str(package), str(fresh / "files")])
    package.unlink()
    _run(["depmod", "--basedir", str(fresh / "files"), version])
    shutil.move(fresh / "files" / "boot" / f"vmlinuz-{version}", fresh / "vmlinuz")
    folder = cache / version
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    link = cache / "current.new"
    link.unlink(missing_ok=True)
    link.symlink_to(version)
    link.rename(cache / "current")


def _recipe() -> str:
    """Changes when the initial file system would be another one."""
    parts = INIT.read_bytes() + "\n".join(MODULES).encode()
    return hashlib.sha256(parts).hexdigest()[:12]


def _build_initial(image: Image) -> None:
    say("building the VM's initial file system")
    tree = image.folder / "initramfs"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("bin", "modules", "proc", "sys", "dev", "lower", "memory", "new"):
        (tree / name).mkdir(parents=True)
    busybox = find_tool("busybox")
    assert busybox is not None
    shutil.copy2(busybox, tree / "bin" / "busybox")
    shutil.copy2(INIT, tree / "init")
    names = []
    for path in _module_files(image):
        name = path.name.removesuffix(".xz")
        names.append(name)
        data = path.read_bytes()
        (tree / "modules" / name).write_bytes(lzma.decompress(data) if path.suffix == ".xz" else data)
    (tree / "modules.list").write_text("".join(f"{name}\n" for name in names))
    for old in image.folder.glob("initramfs-*.gz"):
        old.unlink()
    fresh = image.folder / "initramfs.gz.new"
    pack = f"find . | cpio -o -H newc --quiet | gzip -1 >{shlex.quote(str(fresh))}"
    _run(["bash", "-o", "pipefail", "-c", pack], tree)
    fresh.rename(image.initial)
    shutil.rmtree(tree)


def _module_files(image: Image) -> list[Path]:
    """The modules' files in the order to load them, each after those it needs."""
    base = image.folder / "files"
    listed: dict[Path, None] = {}
    for module in MODULES:
        show = ["modprobe", "--dirname", str(base), "--set-version", image.version, "--show-depends"]
        for line in _run([*show, module]).splitlines():
            verb, _, rest = line.partition(" ")
            if verb == "insmod":
                listed[Path(rest.split()[0])] = None
    return list(listed)


# --- pyverbs ---------------------------------------------------------------------------------


def _python_of_venv() -> str:
    python = VENV / "bin" / "python"
    if not python.exists():
        raise NotPossible("there is no .venv: run scripts/setup first")
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    return _run([str(python), "-c", ask]).strip()


def pyverbs_link() -> Path:
    found = sorted(VENV.glob("lib/python3*/site-packages"))
    return (found[0] if found else VENV) / "pyverbs"


def _link_pyverbs() -> None:
    """Let `.venv` import the distribution's pyverbs: what pip would build does not load everywhere."""
    version = _python_of_venv()
    link = pyverbs_link()
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to("/usr/lib/python3/dist-packages/pyverbs")
    try:
        _run([str(VENV / "bin" / "python"), "-c", "import pyverbs.device"])
    except NotPossible as error:
        link.unlink()
        raise NotPossible(
            f"the distribution's pyverbs does not load in .venv, which is of Python {version}: make .venv with "
            f"the distribution's Python (PYTHON=/usr/bin/python3 scripts/setup)\n{error}"
        ) from None
