"""The alert rules and the dashboard beside what real peers say, and in a real Prometheus that asks three of them."""

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2pstore import blocking
from p2pstore.errors import NoSuchKey, P2PStoreError
from p2pstore.objects import MIB
from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster
from tests.commands import ran
from tests.optional import require_prometheus
from tests.waiting import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "p2pstore.json"
SECONDS = 60.0
OF_PROMETHEUS = {"job", "instance", "le", "up", "ALERTS"}
SEVERITIES = {"critical", "warning", "info"}


# --- what is written in deploy/ ----------------------------------------------------------------


def dashboard_expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for name, value in {"$__rate_interval": "1m", "$job": "p2pstore", "$instance": ".*"}.items():
        found = [expression.replace(name, value) for expression in found]
    assert len(found) > 60
    return found


def alerts() -> list[dict[str, str]]:
    """Name, expression, severity, summary and description of each; a parser of YAML is not needed for ours."""
    found = []
    for rule in ALERTS.read_text().split("- alert: ")[1:]:
        name, _, rest = rule.partition("\n")
        fields = {"alert": name.strip()}
        for field in ("expr", "summary", "description"):
            found_text = re.search(rf"^ +{field}: (?:>-\n)?(.*?)(?=\n +\w+: |\Z)", rest, re.S | re.M)
            assert found_text is not None, (name, field)
            fields[field] = " ".join(found_text[1].split())
        severity = re.search(r"severity: (\w+)", rest)
        assert severity is not None, name
        found.append({**fields, "severity": severity[1]})
    return found


def metrics_and_labels(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics of an expression with the labels by which it chooses or groups them."""
    groups = set(
        itertools.chain.from_iterable(
            re.findall(r"\w+", names) for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        )
    )
    for name, chosen in re.findall(r"\b((?:p2pstore|process)_\w+)(\{[^}]*\})?", expression):
        if name.endswith("_") or name in ("p2pstore",):
            continue
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen))
        yield name, (labels | groups) - OF_PROMETHEUS


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    found = alerts()
    assert len(found) == ALERTS.read_text().count("- alert:") > 20
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["severity"] in SEVERITIES
        assert 10 < len(rule["summary"]) < 200
        assert len(rule["description"]) > 100, rule["alert"]


def test_promtool_finds_the_rules_right() -> None:
    """Their form; and when they fire, by `alerts_test.yml`."""
    promtool = require_prometheus("promtool")
    for words in (
        ["check", "rules", "alerts.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        done = ran([promtool, *words], SECONDS, cwd=ALERTS.parent)
        assert done.returncode == 0, done.stdout + done.stderr


# --- real peers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with new_cluster(3, halves=False) as cluster:
        ssd = cluster.folder / "ssd"
        ssd.mkdir()
        options = ["--network", "local", "--metrics", "127.0.0.1:0", "--quota", "tenant=16MiB"]
        first, *others = cluster.peers
        first.start(*options, "--ssd", str(ssd), "--ssd-capacity", "300MiB")
        first.wait_until_ready()
        for peer in others:
            peer.start(*options, "--bootstrap", first.control)
        for peer in others:
            peer.wait_until_ready()
        work(cluster)
        yield cluster


def work(cluster: ProcessCluster) -> None:
    """Have everything that labels name happen once."""
    first, second, _ = cluster.peers
    value = os.urandom(2 * MIB)
    first.client.put("durable", value, durable=True)
    first.client.put("twice", value, replicas=2)
    assert second.client.get("durable", wait=SECONDS) == value
    assert first.client.get("durable") == value
    with pytest.raises(NoSuchKey):
        second.client.get("nobody has it")
    folder = cluster.folder / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(value)
    first.client.checkpoints.publish("model", str(folder))
    threading.Thread(target=follow, args=(second, cluster.folder / "followed"), daemon=True).start()
    eventually(
        lambda: "p2pstore_checkpoint_follower_ready{" in metrics_page(second),
        SECONDS,
        lambda: "nobody follows",
    )
    eventually(
        lambda: "p2pstore_clock_ahead_seconds" in metrics_page(first),
        SECONDS,
        lambda: "no ping told what time it is elsewhere",
    )


def follow(peer: PeerProcess, folder: Path) -> None:
    """As long as the peer is there."""
    with contextlib.suppress(P2PStoreError), blocking.connect(peer.ready["socket"]) as client:
        client.checkpoints.follow("model", folder, lambda _: None)


def metrics_page(peer: PeerProcess) -> str:
    with urllib.request.urlopen(f"http://{peer.ready['metrics']}/metrics", timeout=SECONDS) as page:
        text: str = page.read().decode()
    return text


def labels_by_name(peers: list[PeerProcess]) -> dict[str, set[str]]:
    """Of all samples; families without any are there with no labels."""
    found: dict[str, set[str]] = {}
    for peer in peers:
        for family in text_string_to_metric_families(metrics_page(peer)):
            suffix = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
            for end in suffix.get(family.type, [""]):
                found.setdefault(family.name + end, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_what_alerts_and_dashboard_name_is_there(cluster: ProcessCluster) -> None:
    there = labels_by_name(cluster.peers)
    expressions = dashboard_expressions() + [rule["expr"] for rule in alerts()]
    named = [pair for expression in expressions for pair in metrics_and_labels(expression)]
    assert len({name for name, _ in named}) > 60
    for name, labels in named:
        assert name in there, name
        assert labels <= there[name], (name, labels - there[name])


def test_promtool_finds_the_metrics_right(cluster: ProcessCluster) -> None:
    promtool = require_prometheus("promtool")
    for peer in cluster.peers:
        done = ran([promtool, "check", "metrics"], SECONDS, input=metrics_page(peer))
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


class Prometheus:
    """A real one, while the block lasts."""

    def __init__(self, address: str) -> None:
        self._address = address

    def api(self, path: str, **query: str) -> Any:
        """The answer's `data`. Raises `OSError` as long as it does not serve."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.api("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """Of the one sample, if there is one."""
        with contextlib.suppress(OSError):
            for sample in self.query(expression):
                return float(sample["value"][1])
        return None


@contextlib.contextmanager
def running_prometheus(folder: Path, peers: list[PeerProcess]) -> Iterator[Prometheus]:
    program = require_prometheus("prometheus")
    config = (ALERTS.parent / "prometheus.yml").read_text().replace("15s", "1s")
    targets = ", ".join(f'"{peer.ready["metrics"]}"' for peer in peers)
    config = config.replace("alerts.yml", str(ALERTS)).replace('"127.0.0.1:9946"', targets)
    (folder / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(address)
    finally:
        process.kill()
        process.wait(SECONDS)


def test_a_real_prometheus_understands_peers_rules_and_dashboard(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    with running_prometheus(tmp_path, cluster.peers) as prometheus:
        eventually(
            lambda: (
                prometheus.value("sum(up)") == 3
                and prometheus.value("count(count_over_time(p2pstore_members[1m]) >= 3)") == 12
            ),
            SECONDS,
            lambda: "it does not ask three peers",
        )
        for expression in dashboard_expressions():
            prometheus.query(expression)
        assert prometheus.value('max(p2pstore_members{status="alive"})') == 3
        assert prometheus.value('sum(p2pstore_client_gets_total{answer="nobody"})') == 1
        (groups,) = prometheus.api("rules", type="alert").values()
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == {rule["alert"] for rule in alerts()}
        eventually(
            lambda: all(
                rule["health"] == "ok"
                for group in prometheus.api("rules")["groups"]
                for rule in group["rules"]
            ),
            SECONDS,
            lambda: "a rule cannot be evaluated",
        )
        cluster.peers[2].kill()
        eventually(
            lambda: prometheus.value('count(ALERTS{alertname="P2PStorePeerDown"})') == 1,
            SECONDS,
            lambda: "nobody is told that a peer is gone",
        )
        eventually(
            lambda: prometheus.value('count(ALERTS{alertname="P2PStoreMemberDied"})') == 1,
            SECONDS,
            lambda: "nobody is told that a member died",
        )
