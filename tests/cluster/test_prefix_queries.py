"""`POST /v1/prefix` and `POST /query` of real peers, as routers ask them."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from shutil import which
from typing import Any
from urllib.request import urlopen

import pytest

from p2pstore import open_peer
from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.peer.prefix_queries import PrefixRequest
from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster
from tests.commands import ran
from tests.waiting import eventually

SECONDS = 30.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "prefix_query.sh"


@pytest.fixture(params=["full", "partitioned"])
def cluster(request: pytest.FixtureRequest) -> Iterator[ProcessCluster]:
    with new_cluster(2, halves=False) as cluster:
        options = ["--directory", request.param, "--http", "127.0.0.1:0", "--network", "local"]
        cluster.start_first(*options)
        yield cluster


def ask(peer: PeerProcess, path: str, body: Any, token: str = "") -> tuple[int, Any]:
    """The status, and the document or the text."""
    with closing(http.client.HTTPConnection(peer.ready["metrics"], timeout=SECONDS)) as connection:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, text, headers)
        answer = connection.getresponse()
        content = answer.read()
        is_json = answer.getheader("Content-Type") == "application/json"
        return answer.status, json.loads(content) if is_json else content.decode()


def test_prefixes_of_two_peers(cluster: ProcessCluster) -> None:
    first, second = cluster.peers
    keys = [f"model/{number:02x}{rank}" for number in range(8) for rank in "ab"]
    first.client.put_many([(key, b"1") for key in keys[:12]])
    second.client.put_many([(key, b"2") for key in keys[12:14]])
    eventually(lambda: all(first.client.contains_many(keys[:14])), SECONDS)
    eventually(lambda: all(second.client.contains_many(keys[:14])), SECONDS)

    asked = {"prefix": "model/", "hashes": [f"{each:02x}" for each in range(8)]}
    asked["suffixes"] = ["a", "b"]
    for peer in cluster.peers:
        status, document = ask(peer, "/v1/prefix", {"keys": keys})
        assert (status, document["matched"], document["complete"]) == (200, 14, False)
        assert document["holders"] == [
            {
                "peer_id": each.peer_id,
                "peer": each.peer,
                "blocks": each.blocks,
                "memory_blocks": each.memory_blocks,
                "local": each.local,
            }
            for each in peer.client.match_prefix_by_peer(keys)
        ]
        assert [each["blocks"] for each in document["holders"]] == [12]
        status, document = ask(peer, "/v1/prefix", asked)
        assert (status, document["matched"], document["complete"]) == (200, 7, False)
        assert [each["blocks"] for each in document["holders"]] == [6]
        status, document = ask(peer, "/query", {**asked, "block_size": 16})
        counts = {"longest_matched": 96, "GPU": 0, "DP": {}, "CPU": 96, "DISK": 96}
        assert (status, document) == (200, {"default": {first.name: counts}})
        status, document = ask(peer, "/v1/estimate", {"keys": keys})
        estimate = peer.client.estimate(keys)
        assert (status, document.pop("p90_seconds")) == (
            200,
            pytest.approx(estimate.p90_seconds, rel=0.5),
        )
        assert (
            estimate.by_key
            == document["by_key"]
            == [estimate.by_key[0]] * 12 + [*document["by_key"][12:14], -1, -1]
        )
        assert (estimate.blocks, document["blocks"], document["bytes"]) == (14, 14, estimate.bytes)
        kinds = {each.peer: each.kind for each in estimate.sources}
        assert kinds == {
            peer.name: "memory",
            next(each.name for each in cluster.peers if each is not peer): "neighbour",
        }
        assert peer.client.estimate(["", "nowhere", keys[0]]).by_key == [-1, -1, 0]
    assert ask(first, "/v1/prefix", {"keys": keys, "namespace": "other"})[1]["matched"] == 0

    first.kill()
    eventually(lambda: ask(second, "/v1/prefix", {"keys": keys})[1]["matched"] == 0, SECONDS)
    assert ask(second, "/v1/prefix", {"keys": keys[12:]})[1]["matched"] == 2


@pytest.mark.parametrize("cluster", ["full"], indirect=True)
def test_wrong_queries_are_answered_and_harm_nothing(cluster: ProcessCluster) -> None:
    peer = cluster.peers[0]
    for body in [
        *(b"", b"[]", b"{", b"\xff\xfe", b'{"keys": [1]}', {}, {"keys": []}, {"keys": ["a" * 2000]}),
        *({"keys": ["a"], "hashes": ["b"]}, {"keys": ["a"], "unknown": 1}, {"keys": [""]}),
        *({"keys": ["a"] * 4097}, {"hashes": ["a"] * 100, "suffixes": ["b"] * 100}),
        *({"hashes": ["a"], "suffixes": []}, {"keys": ["a"], "namespace": "n" * 999}),
        *(b"[" * 100_000, {"hashes": ["a" * 60_000] * 16, "suffixes": ["b"] * 256}),
        {"prefix": "a" * 900_000, "hashes": ["b"] * 4096},
    ]:
        status, text = ask(peer, "/v1/prefix", body)
        assert status == 422, body
        assert text, body
    status_text = Path(f"/proc/{peer.process_id}/status").read_text()
    assert int(status_text.partition("VmHWM:")[2].split()[0]) < 1 << 20, "over a gigabyte at some moment"
    assert ask(peer, "/v1/prefix", b"1" * (1 << 20) + b"1")[0] == 413
    assert ask(peer, "/query", {"keys": ["a"]})[0] == 422
    assert ask(peer, "/v1/prefix", {"keys": ["a"] * 4096})[1]["matched"] == 0


@pytest.mark.skipif(which("curl") is None, reason="the example needs curl")
@pytest.mark.parametrize("cluster", ["full"], indirect=True)
def test_the_example_with_curl(cluster: ProcessCluster) -> None:
    peer, keys = cluster.peers[0], ['quote"and\\backslash', "second"]
    peer.client.put(keys[0], b"1")
    command = [EXAMPLE, peer.ready["metrics"], *keys]
    done = ran(command, SECONDS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["matched"] == 1


@pytest.mark.parametrize("cluster", ["full"], indirect=True)
def test_the_description_names_all_queries_and_their_fields(cluster: ProcessCluster) -> None:
    with urlopen(f"http://{cluster.peers[0].ready['metrics']}/openapi.json") as answer:
        description = json.load(answer)
    posts = {path for path, methods in description["paths"].items() if "post" in methods}
    assert posts == {"/v1/prefix", "/v1/estimate", "/query"}
    fields = description["components"]["schemas"]["Prefix"]["properties"]
    assert set(fields) == set(PrefixRequest.__struct_fields__)


async def test_a_token_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    config = PeerConfig(memory="1MiB", metrics="127.0.0.1:0", http_token_file=str(token))
    for content, mode, reason in [
        (None, 0o600, "does not exist"),
        ("short", 0o600, "16 to 1,024"),
        ("a secret of routers", 0o644, "token"),
    ]:
        if content is not None:
            token.write_text(content)
            token.chmod(mode)
        with pytest.raises(ConfigError, match=reason):
            async with open_peer(config):
                pass
    with pytest.raises(ConfigError, match="no HTTP server"):
        PeerConfig(http_token_file="token").checked()
    with new_cluster(1, halves=False) as cluster:
        token.chmod(0o600)
        cluster.start_first("--http", "127.0.0.1:0", "--http-token-file", str(token))
        assert ask(cluster.peers[0], "/v1/prefix", {"keys": ["a"]})[0] == 401
        assert ask(cluster.peers[0], "/v1/prefix", {"keys": ["a"]}, token.read_text())[0] == 200
