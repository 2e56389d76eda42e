"""Which module may import which, read from the sources without importing any of them.

The rules are those of ARCHITECTURE.md: shells do not know each other, one module knows libp2p, one
knows pyverbs, the client side never pulls in a peer, and a pure module decides without doing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Where packages live, and the name each is imported by. The longest match wins.
PACKAGES = {"p2pstore": "p2pstore", "cli/mooncake_p2p": "mooncake_p2p"}

SSD_TIER_KNOWS = (
    "p2pstore.ssd_tier",
    "p2pstore.objects",
    "p2pstore.errors",
    "p2pstore.wire",
    "p2pstore.runtime.trio_tasks",
    "p2pstore.runtime.linux",
    "p2pstore.runtime.histograms",
)
"""Of p2pstore: the tier knows no peers, no memory segments and no settings."""

CHECKPOINT_KNOWS = (
    "p2pstore.checkpoint",
    "p2pstore.objects",
    "p2pstore.errors",
    "p2pstore.wire",
    "p2pstore.runtime.trio_tasks",
    "p2pstore.state.folder",
)
CHECKPOINT_ALONE = ("p2pstore.checkpoint.content", "p2pstore.checkpoint.swarm")
"""A swarm is told who there is, and its pieces are moved by others."""

STRANGERS = ("p2pstore.gossip", "p2pstore.transfer", "p2pstore.ssd_tier")

LIBP2P = ("libp2p", "multiaddr")
LIBP2P_MODULE = "p2pstore/gossip/links/libp2p_parts.py"
PYVERBS_MODULE = "p2pstore/transfer/rdma/rdma_verbs.py"

CLIENT_SIDE = (
    *("p2pstore.client", "p2pstore.local", "p2pstore.blocking", "p2pstore.aio"),
    "p2pstore.checkpoint.client",
    *("p2pstore.integrations", "mooncake_p2p"),
)
PEER_SIDE = ("p2pstore.peer", "p2pstore.gossip", "p2pstore.checkpoint.peer")
JOIN = "cli/mooncake_p2p/commands/join.py"

PURE = (
    "p2pstore/core/*.py",
    "p2pstore/memory/*.py",
    "p2pstore/trace/*.py",
    "simulation/*.py",
    *(
        f"p2pstore/gossip/*{name}.py"
        for name in (
            "machine",
            "state",
            "messages",
            "effects",
            "records",
            "config",
            "incoming",
            "keeping",
        )
    ),
    *(
        f"p2pstore/gossip/{folder}/*.py"
        for folder in ("exchange", "floors", "homes", "locations", "members")
    ),
    *(f"p2pstore/gossip/links/{name}.py" for name in ("admission", "yamux")),
    *(
        f"p2pstore/transfer/{name}.py"
        for name in (
            *("data_messages", "peer_messages", "failover", "read_tickets", "transfer_trace"),
            *("reading/arriving", "rdma/rdma_rules", "rdma/rdma_topology", "serving/session_rules"),
        )
    ),
    *(
        f"p2pstore/ssd_tier/{name}.py"
        for name in (
            *("disk_protocol", "log_layout", "record_format", "footer", "recovery"),
            *("index", "record_rows", "index_walks"),
            *("log_segments", "write_admission", "health"),
        )
    ),
    "p2pstore/checkpoint/swarm/*.py",
    *(f"p2pstore/checkpoint/content/{name}.py" for name in ("manifest", "pieces")),
    "p2pstore/checkpoint/peer/piece_flow.py",
    "p2pstore/checkpoint/checkpoint_messages.py",
    *(f"p2pstore/status/doctor/{name}.py" for name in ("finding", "*_rules", "redaction")),
    *(
        f"p2pstore/status/{name}.py"
        for name in ("slow_operations", "measures", "metric*", "problems", "survey")
    ),
    "p2pstore/integrations/mooncake/mooncake_types.py",
    *(
        f"p2pstore/{name}.py"
        for name in (
            "addresses",
            "objects",
            "location_table",
            "home_messages",
            "wire",
            "put_facts",
            "arguments",
        )
    ),
    "p2pstore/local/local_messages.py",
    "p2pstore/local/local_protocol.py",
    *(f"p2pstore/access/{name}.py" for name in ("allowlist", "crowding")),
    "p2pstore/client/read_plan.py",
    "p2pstore/runtime/histograms.py",
)
"""`*` crosses folders; `p2pstore/memory/mapped` is the one exception, below."""
IMPURE_FOLDERS = ("p2pstore/memory/mapped/",)
ANONYMOUS_MEMORY = "p2pstore/gossip/locations/reserved_memory.py"
"""Memory of the process alone is no I/O: this module's imports do not make a module impure."""
IMPURE = (
    *("trio", "asyncio", "anyio", "threading", "multiprocessing", "concurrent", "subprocess"),
    *("socket", "ssl", "select", "selectors", "signal"),
    *("os", "pathlib", "shutil", "tempfile", "mmap", "fcntl", "ctypes"),
    *("time", "datetime", "secrets", "uuid"),
)


@dataclass(frozen=True)
class Import:
    """One module that a source names in an import, wherever in the source that is."""

    module: str
    line: int
    runs_at_import: bool
    """False inside a function and under `if TYPE_CHECKING`."""


def within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def module_name(path: str) -> str:
    for folder in sorted(PACKAGES, key=len, reverse=True):
        if path.startswith(folder + "/"):
            parts = path.removeprefix(folder + "/").removesuffix(".py").split("/")
            return ".".join([PACKAGES[folder], *(part for part in parts if part != "__init__")])
    raise ValueError(f"{path} is in none of {sorted(PACKAGES)}: say in PACKAGES how it is imported")


def imports_of(path: str, tree: ast.Module) -> list[Import]:
    package = module_name(path).split(".")
    if not path.endswith("/__init__.py"):
        package.pop()

    def modules(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield alias.name
            case ast.ImportFrom():
                # A name imported from a package may be a module of it: `from p2pstore import peer`.
                start = package[: len(package) + 1 - node.level] if node.level else []
                parent = ".".join([*start, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield parent if alias.name == "*" else f"{parent}.{alias.name}"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]):
                if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                    relative = str(first.value).startswith(".")
                    yield ".".join(package) * relative + str(first.value)

    def walk(node: ast.AST, runs: bool) -> Iterator[Import]:
        for module in modules(node):
            yield Import(module, getattr(node, "lineno", 0), runs)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                yield from walk(statement, False)
            for statement in node.orelse:
                yield from walk(statement, runs)
            return
        inside = runs and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return list(walk(tree, True))


def impure_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Files opened, and random numbers that do not come from a generator the caller passed in."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="open" | "input" | "print" as name)):
                yield node.lineno, f"calls {name}()"
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="random"), attr="Random") | ast.Name(id="Random"),
                args=[],
            ):
                yield node.lineno, "makes a random.Random() without a seed"
            case ast.Attribute(value=ast.Name(id="random"), attr=attr) if attr != "Random":
                yield node.lineno, f"uses random.{attr}: take an rng argument"
            case ast.ImportFrom(module="random", level=0):
                for alias in node.names:
                    if alias.name != "Random":
                        yield node.lineno, f"imports random.{alias.name}: take an rng argument"


def check(sources: Mapping[str, str]) -> list[str]:
    """Every rule broken by these sources (path in the repository -> text), one line each."""
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    imports = {path: imports_of(path, tree) for path, tree in trees.items()}
    path_of = {module_name(path): path for path in trees}
    broken: list[str] = []

    def known(module: str) -> str | None:
        """The source of a module, or of the module that holds this name."""
        return path_of.get(module) or path_of.get(module.rpartition(".")[0])

    def parents(module: str) -> Iterator[str]:
        parts = module.split(".")
        for length in range(1, len(parts)):
            if path := path_of.get(".".join(parts[:length])):
                yield path

    def loads(start: str, *, with_parents: bool) -> Iterator[tuple[str, Import]]:
        """Every import that runs when this source is imported, and the source it stands in."""
        pending, seen = [start], {start}
        if with_parents:
            pending += parents(module_name(start))
        while pending:
            path = pending.pop()
            seen.add(path)
            for imported in imports[path]:
                if not imported.runs_at_import:
                    continue
                yield path, imported
                found = [known(imported.module)]
                if with_parents:
                    found += parents(imported.module)
                pending += [each for each in found if each is not None and each not in seen]

    for path in sorted(trees):
        module = module_name(path)
        pure = (
            path != ANONYMOUS_MEMORY
            and not path.startswith(IMPURE_FOLDERS)
            and any(fnmatchcase(path, pattern) for pattern in PURE)
        )
        client_side = within(module, CLIENT_SIDE)

        for imported in imports[path]:
            where, name = f"{path}:{imported.line}", imported.module
            for stranger in STRANGERS:
                others = [each for each in STRANGERS if each != stranger]
                if within(module, [stranger]) and within(name, others):
                    broken.append(f"{where}: imports {name}; only the peer knows both")
            if (
                within(module, ["p2pstore.ssd_tier"])
                and within(name, ["p2pstore"])
                and not within(name, SSD_TIER_KNOWS)
            ):
                broken.append(f"{where}: imports {name}; the SSD tier knows {SSD_TIER_KNOWS}")
            if (
                within(module, CHECKPOINT_ALONE)
                and within(name, ["p2pstore"])
                and not within(name, CHECKPOINT_KNOWS)
            ):
                broken.append(f"{where}: imports {name}; checkpoints know {CHECKPOINT_KNOWS}")
            if within(name, LIBP2P) and path != LIBP2P_MODULE:
                broken.append(f"{where}: imports {name}; only {LIBP2P_MODULE} may")
            if within(name, ["pyverbs"]):
                if path != PYVERBS_MODULE:
                    broken.append(f"{where}: imports {name}; only {PYVERBS_MODULE} may")
                if imported.runs_at_import:
                    broken.append(f"{where}: imports {name} when it is itself imported")
            if client_side and within(name, PEER_SIDE):
                allowed = within(name, ["p2pstore.peer"]) and path == JOIN
                if not allowed or imported.runs_at_import:
                    broken.append(f"{where}: imports {name}; the client side never does")
            if pure and within(name, IMPURE):
                broken.append(f"{where}: pure, but imports {name}")

        if pure:
            broken += [f"{path}:{line}: pure, but {what}" for line, what in impure_uses(trees[path])]
            broken += [
                f"{path}: pure, but loads {imported.module} through {via}:{imported.line}"
                for via, imported in loads(path, with_parents=False)
                if via not in (path, ANONYMOUS_MEMORY) and within(imported.module, (*IMPURE, *LIBP2P))
            ]
        if client_side:
            broken += [
                f"{path}: loads {imported.module} through {via}:{imported.line}; "
                "the client side never does"
                for via, imported in loads(path, with_parents=True)
                if via != path and within(imported.module, ("p2pstore.peer", *LIBP2P))
            ]

    return broken


def sources_of_this_project() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in ("p2pstore", "cli")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_this_project_breaks_no_rule() -> None:
    sources = sources_of_this_project()
    assert "p2pstore/__init__.py" in sources
    assert "cli/mooncake_p2p/__init__.py" in sources
    assert check(sources) == []


BANNED_CALLS = {
    ("select", "select"): "fails in a process with over 1,023 descriptors: `readiness.is_ready`",
    ("Path", "home"): "raises where a user has no home: `places.state_root`",
    ("os", "getlogin"): "raises where there is no terminal: `place_owners.user_name`",
    ("getpass", "getuser"): "raises where a user has no name: `place_owners.user_name`",
    ("pwd", "getpwuid"): "raises where a user has no name: `place_owners.user_name`",
    ("fcntl", "lockf"): "waits for whoever has the lock: `flock` with LOCK_NB",
}
MAY_CALL = {
    "p2pstore/state/places.py": ("Path", "home"),
    "p2pstore/runtime/linux.py": ("pwd", "getpwuid"),
}


def test_calls_that_fail_or_wait_in_some_environment_are_not_made() -> None:
    found = []
    for path, text in sources_of_this_project().items():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = (ast.unparse(node.func.value), node.func.attr)
            if called in BANNED_CALLS and MAY_CALL.get(path) != called:
                found.append(f"{path}:{node.lineno}: {'.'.join(called)} {BANNED_CALLS[called]}")
            if called == ("fcntl", "flock") and "LOCK_NB" not in ast.unparse(node):
                found.append(f"{path}:{node.lineno}: flock waits for whoever has the lock")
    assert found == []


ALLOWED = {
    "p2pstore/__init__.py": "def open_peer():\n    from p2pstore.peer import Peer\n",
    "p2pstore/peer.py": "from p2pstore import gossip, transfer, ssd_tier\nfrom .gossip import host",
    "p2pstore/gossip/__init__.py": "",
    "p2pstore/gossip/links/host.py": "import trio",
    "p2pstore/gossip/links/libp2p_parts.py": "import libp2p\nfrom multiaddr import Multiaddr",
    "p2pstore/gossip/locations/log.py": "import random\nrng = random.Random(1)\nfrom ...wire import pack",
    "p2pstore/transfer/rdma/rdma_verbs.py": "def load():\n    import pyverbs.device",
    "p2pstore/wire.py": "from random import Random\nimport struct",
    "p2pstore/client.py": "import trio\nfrom .local import messages\nfrom p2pstore import wire",
    "p2pstore/local/__init__.py": "",
    "p2pstore/local/local_messages.py": "import msgspec",
    "p2pstore/peer_name.py": "",
    "cli/mooncake_p2p/main.py": "from p2pstore import client, peer_name",
    "cli/mooncake_p2p/commands/join.py": "async def join():\n    from p2pstore.peer import Peer",
}


def test_what_the_design_allows_passes() -> None:
    assert check(ALLOWED) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("p2pstore/gossip/a.py", "import p2pstore.transfer.engine", "only the peer"),
        ("p2pstore/gossip/a.py", "from ..transfer import engine", "only the peer"),
        ("p2pstore/gossip/b/c.py", "from ...ssd_tier.log import x", "only the peer"),
        ("p2pstore/gossip/__init__.py", "from .. import transfer", "only the peer"),
        ("p2pstore/transfer/a.py", "def f():\n    from p2pstore import gossip", "only the peer"),
        ("p2pstore/ssd_tier/a.py", "import importlib as i\ni.import_module('p2pstore.gossip')", "peer"),
        ("p2pstore/ssd_tier/a.py", "from p2pstore.core import placing", "the SSD tier knows"),
        ("p2pstore/checkpoint/swarm/a.py", "from p2pstore.gossip import records", "checkpoints know"),
        ("p2pstore/gossip/other.py", "import libp2p.peer.id", "may"),
        ("p2pstore/peer.py", "def f():\n    from multiaddr import Multiaddr", "may"),
        ("p2pstore/transfer/other.py", "def f():\n    import pyverbs", "rdma_verbs.py may"),
        ("p2pstore/transfer/rdma/rdma_verbs.py", "import pyverbs", "when it is itself imported"),
        ("p2pstore/client.py", "from p2pstore.peer import Peer", "client side"),
        ("p2pstore/client.py", "def f():\n    from . import peer", "client side"),
        ("p2pstore/local/driver.py", "from ..gossip.log import Log", "client side"),
        ("p2pstore/blocking/__init__.py", "from .. import peer", "client side"),
        ("cli/mooncake_p2p/main.py", "def f():\n    import p2pstore.peer", "client side"),
        ("cli/mooncake_p2p/commands/join.py", "import p2pstore.peer", "client side"),
        ("cli/mooncake_p2p/commands/join.py", "def f():\n    import p2pstore.gossip", "client"),
        ("p2pstore/__init__.py", "from .peer import Peer", "loads p2pstore.peer.Peer through"),
        ("p2pstore/wire.py", "import p2pstore.peer", "loads p2pstore.peer through"),
        ("p2pstore/core/deep/a.py", "import trio", "pure"),
        ("p2pstore/core/a.py", "from time import monotonic", "pure"),
        ("p2pstore/core/a.py", "def f():\n    import os.path", "pure"),
        ("p2pstore/core/a.py", "from p2pstore.gossip.links.host import Host", "pure, but loads trio"),
        ("p2pstore/gossip/locations/log.py", "import random\nrandom.random()", "uses random.random"),
        ("p2pstore/gossip/locations/log.py", "from random import choice", "imports random.choice"),
        ("p2pstore/gossip/locations/log.py", "import random\nrandom.Random()", "without a seed"),
        ("p2pstore/objects.py", "def f(p):\n    return open(p)", "calls open()"),
    ],
)
def test_each_rule_can_be_broken(path: str, source: str, complaint: str) -> None:
    broken = check({**ALLOWED, path: source})
    assert broken
    assert any(complaint in line for line in broken), broken


def test_imports_for_type_checkers_do_not_run() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
    found = {each.module: each.runs_at_import for each in imports_of("p2pstore/x.py", ast.parse(source))}
    assert found == {"typing.TYPE_CHECKING": True, "a": False, "b": True}


def test_a_source_outside_the_known_folders_is_refused() -> None:
    with pytest.raises(ValueError, match="say in PACKAGES"):
        check({"elsewhere/a.py": ""})
