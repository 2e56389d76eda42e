"""Peers import the parts of libp2p that they use, and no others; a program that embeds a peer still can use all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(program: str, *, path: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=None if path is None else {"PYTHONPATH": f"{path}:{':'.join(sys.path)}"},
    )
    return done.stdout


def test_a_peer_imports_what_it_uses() -> None:
    run(
        "import sys, p2pstore.peer.api\n"
        "for name in ('libp2p.host', 'libp2p.relay', 'libp2p.transport.manager', 'zeroconf', 'requests'):\n"
        "    assert name not in sys.modules, name\n"
    )


@pytest.mark.parametrize(
    "use",
    [
        "import libp2p; assert not hasattr(libp2p, 'no_such_thing'); libp2p.new_host()",
        "from libp2p.transport import TransportManager\n"
        "import libp2p.crypto.ed25519; libp2p.crypto.ed25519.create_new_key_pair()",
        "import libp2p.network.swarm; assert libp2p.network.swarm.Swarm\n"
        "from libp2p import new_host; new_host()",
    ],
)
def test_a_program_with_a_peer_has_all_of_libp2p(use: str) -> None:
    run(f"import p2pstore.peer.api\n{use}")


def test_libp2p_that_was_imported_before_stays_as_it_is() -> None:
    run(
        "import libp2p\n"
        "before = libp2p.new_host, vars(libp2p).copy()\n"
        "import p2pstore.peer.api\n"
        "assert type(libp2p).__name__ == 'module' and vars(libp2p).items() >= before[1].items()\n"
    )


def test_a_package_whose_code_fails_fails_each_time_it_is_asked(tmp_path: Path) -> None:
    package = tmp_path / "broken_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('broken')\nname = 1\n")
    (package / "part.py").write_text("works = True\n")
    said = run(
        "from p2pstore.gossip.links.libp2p_parts import deferred\n"
        "with deferred('broken_package', 'there_is_none'):\n"
        "    from broken_package.part import works\n"
        "import broken_package\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        broken_package.name\n"
        "    except OSError as error:\n"
        "        print(works, error)\n",
        path=tmp_path,
    )
    assert said == "True broken\nTrue broken\n"
