"""`join --metrics` in a browser: three real peers, with names, keys and checkpoints that attack who looks at them."""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pstore.errors import NoSuchKey
from p2pstore.objects import MIB
from tests.cluster.browser import Browser, open_browser, require_chromium
from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster

SCRIPT = "<script>document.title = 'taken over'</script>"
IMAGE = "<img src=x onerror=\"document.title='taken over'\">"
CHECKPOINT = "<img/src=x>model</img>"
FASTER = """{
    const later = window.setTimeout;
    window.setTimeout = (what, after, ...rest) =>
        later(what, { 2000: 100, 5000: 2000 }[after] ?? after, ...rest);
}"""
"""The page asks every two seconds, and waits five for an answer: in here, twenty times as often."""
LOOKS = {
    "phone-light": (360, 800, False),
    "phone-dark": (360, 800, True),
    "wide-light": (1400, 900, False),
    "wide-dark": (1400, 900, True),
}


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    require_chromium()
    with new_cluster(3, halves=False) as cluster:
        yield cluster


def start(cluster: ProcessCluster) -> None:
    """The first peer shows keys, and has an SSD; the last one's name is an attack."""
    ssd = cluster.folder / "ssd"
    ssd.mkdir()
    first, second, third = cluster.peers
    page = ("--network", "local", "--metrics", "127.0.0.1:0")
    disk = ("--ssd", str(ssd), "--ssd-capacity", "300MiB", "--quota", "default=4MiB")
    first.start(*page, "--metrics-keys", *disk)
    second.start(*page, "--bootstrap", first.control)
    third.start(*page, "--bootstrap", first.control, "--name", IMAGE)
    for peer in cluster.peers:
        peer.wait_until_ready()


def fill(cluster: ProcessCluster, folder: Path) -> None:
    """Put, read and miss something; publish a checkpoint."""
    first, second, _ = cluster.peers
    first.client.put(SCRIPT, b"x" * MIB)
    second.client.put(SCRIPT + " of the second", b"y" * MIB)
    for _ in range(5):
        first.client.get(SCRIPT)
    second.client.get(SCRIPT + " of the second")
    first.client.get(SCRIPT + " of the second")
    with pytest.raises(NoSuchKey):
        first.client.get("never put")
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(MIB))
    second.client.checkpoints.publish(CHECKPOINT, str(folder))


def status(peer: PeerProcess) -> dict[str, Any]:
    """The data of a peer's page."""
    with urllib.request.urlopen(f"http://{peer.ready['metrics']}/status.json", timeout=20) as got:
        document: dict[str, Any] = json.loads(got.read())
        return document


def text_of(browser: Browser, place: str) -> str:
    text: str = browser.evaluate(f"document.querySelector('{place}').innerText")
    return text


def looks_well(browser: Browser) -> None:
    """Nothing sticks out at any width, and there are two sets of colours. P2PSTORE_SCREENSHOTS=DIR keeps pictures."""
    grounds = set()
    for name, (width, height, dark) in LOOKS.items():
        browser.look(width, height, dark=dark)
        browser.wait_for(f"screen.width === {width}")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
        grounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        if folder := os.environ.get("P2PSTORE_SCREENSHOTS"):
            browser.screenshot(Path(folder) / f"{name}.png", whole=width < 500)
    assert len(grounds) == 2


def test_the_page_of_a_peer(cluster: ProcessCluster, tmp_path: Path) -> None:
    start(cluster)
    fill(cluster, tmp_path / "model")
    first, second, third = cluster.peers
    address = f"http://{first.ready['metrics']}/"
    with open_browser(tmp_path) as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=FASTER)
        browser.call("Page.navigate", url=address)
        browser.wait_for("document.querySelector('main')?.hidden === false")

        # The parts that it must have.
        browser.wait_for("document.querySelectorAll('#members tbody tr').length === 3")
        browser.wait_for("document.querySelector('#state').innerText === 'All is well'")
        browser.wait_for(
            f"document.querySelector('#checkpoints').innerText.includes({json.dumps(CHECKPOINT)})"
        )
        members, hottest = text_of(browser, "#members"), text_of(browser, "#hottest")
        assert "p0 this peer" in members
        assert IMAGE in members
        assert SCRIPT in hottest
        assert "1.0\u00a0MiB" in hottest
        # Six of seven gets found something. Clients tell of their reads now and then.
        browser.wait_for("document.querySelector('#vitals').innerText.includes('85.7\u00a0%')")
        assert "shm\t1.0\u00a0MiB\t0\t" in text_of(browser, "#transfers")
        for fact in ("quota", "SSD", "as many as wanted"):
            assert fact in text_of(browser, "#peer")
        looks_well(browser)

        # Text of others is text, and nothing else.
        assert browser.evaluate("document.querySelectorAll('script').length") == 1
        assert browser.evaluate("document.querySelectorAll('img, b[onclick]').length") == 0
        assert browser.evaluate("document.title").endswith("p0 \u2013 All is well")

        # It asks the peer while it is visible, and not while it is hidden.
        first.client.put("one more", b"z")
        browser.wait_for("document.querySelector('#peer').innerText.includes('2, nothing in use')")
        show_or_hide(browser, hidden=True)
        asked = len(browser.asked_for)
        browser.evaluate("new Promise((done) => setTimeout(done, 600))")
        assert len(browser.asked_for) <= asked + 1  # one may have been under way
        show_or_hide(browser, hidden=False)

        # A missing member is named first, and that the peer itself is silent, and since when.
        third.kill()
        browser.wait_for("document.querySelector('#state').innerText.includes('1 member is dead')")
        row = browser.evaluate("document.querySelector('#members tbody tr').innerText")
        assert IMAGE in row
        assert "dead for" in row
        assert browser.complaints == []
        with first.stopped():
            said = browser.wait_for(
                "!document.querySelector('#lost').hidden && document.querySelector('#lost').innerText"
            )
            assert "The peer has not answered since" in said
            assert browser.evaluate("document.title").startswith("\u2715 no answer")
        browser.wait_for("document.querySelector('#lost').hidden")

        # Nothing came from anywhere else; a script that is not its own does not run.
        assert {each.removeprefix(address) for each in browser.asked_for} == {"", "status.json"}
        browser.evaluate(
            "{const s = document.createElement('script'); s.text = 'window.ran = 1'; document.body.append(s)}"
        )
        assert browser.evaluate("window.ran") is None
        assert "Content Security Policy" in "".join(browser.complaints)

    # Without `metrics_keys` the page shows no keys; clients of the socket get them.
    kept = status(second)
    assert SCRIPT not in json.dumps(kept)
    assert [each["namespace"] for each in kept["hottest"]] == ["default"]
    assert SCRIPT in second.client.statistics()["peer"]["hottest"][0]["key"]


def show_or_hide(browser: Browser, *, hidden: bool) -> None:
    """As if the page's tab were covered by another, or not any more."""
    browser.evaluate(
        f"Object.defineProperty(document, 'hidden', {{value: {json.dumps(hidden)}, configurable: true}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
