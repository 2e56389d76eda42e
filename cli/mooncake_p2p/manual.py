"""The commands, and the part of their help that is prose: examples that work, and exit statuses.

`tests/unit/test_cli_manual.py` parses every example, so that none outlives an option.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MEANINGS: Final[dict[int, str]] = {
    0: "done",
    1: "failed; stderr says why",
    2: "wrong arguments or settings",
    3: "no such key",
    4: "no peer to talk to, or several and none was chosen",
    5: "the deadline passed without progress",
    6: "copies are known, but none of their peers can be reached",
    130: "stopped by Ctrl-C",
}
ALWAYS: Final = (0, 1, 2, 130)
"""Exit statuses of every command."""

MANUAL: Final = """\
join: Run a peer in the foreground. (join)
    mooncake-p2p join  # A peer that serves this machine alone, with an eighth of its memory.
    mooncake-p2p join --name b --listen 127.0.0.1:7002 --bootstrap 127.0.0.1:17946
        # A second peer on this machine, which joins the first.
    mooncake-p2p join --detach --interface eth1 --cluster-key-file /etc/p2p.key
        # The first peer of several machines, in the background. Only peers with this key get in.
    mooncake-p2p join --invite p2pstore1:k6dkZWZhdWx0ka4xMC4wLjAuMToxNzk0NpA
        # On the next machine: the line that `invite` printed on the first one, with the key in it.
    mooncake-p2p join --bootstrap 10.0.0.1:17946 --cluster-key-file /etc/p2p.key
        # The same without an invite, with a copy of the key file.
    0: left the cluster on Ctrl-C, SIGTERM or `leave`
    130: stopped by Ctrl-C before it served
put: Store a file, or standard input, under a key. (put_get) [4 5]
    mooncake-p2p put model/part-1 part-1.safetensors  # Store a file.
    tar c checkpoint | mooncake-p2p put checkpoint.tar  # Store what a program writes.
    mooncake-p2p put prompt/7 kv.bin --replicas 2 --ttl 10m  # On two peers, and for ten minutes.
    mooncake-p2p put config config.json --overwrite --pin hard  # Replace what is there, and never evict it.
    1: failed; also when the key has other bytes and --overwrite was not given
get: Fetch the value of a key. (put_get) [3 4 5 6]
    mooncake-p2p get model/part-1 -o part-1.safetensors  # Into a file.
    mooncake-p2p get checkpoint.tar | tar x  # Into another program.
    mooncake-p2p get prompt/7 -o kv.bin --wait 30  # Wait up to half a minute until it is put.
    mooncake-p2p get model/part-1 -o /dev/null --explain  # See which peer it came from, and what took how long.
    3: no such key, or still none after --wait
ls: List keys of the whole cluster. (stored_keys) [4 5]
    mooncake-p2p ls  # The first 1,000 keys of the whole cluster.
    mooncake-p2p ls model/ --limit 20 --after model/part-3  # The next page.
    mooncake-p2p ls --local --pinned  # Objects that stay in this peer's memory.
    mooncake-p2p ls prompt/ --json  # For programs: keys, more, silent_peers.
    0: done, also when peers did not answer: stderr and silent_peers name them
rm: Remove keys everywhere. (stored_keys) [3 4 5 6]
    mooncake-p2p rm prompt/7 prompt/8  # Remove two keys.
    mooncake-p2p rm --prefix prompt/ --yes  # Remove all keys that begin with prompt/.
    1: failed; also when peers that did not answer may hold more such keys
    3: keys did not exist (the others were removed), or none begins with --prefix
flush: Remove everything in a namespace, on all peers. (stored_keys) [4 5]
    mooncake-p2p flush job-17 --yes  # Remove everything in namespace job-17.
    mooncake-p2p flush default  # Everything that was put without --namespace, after a question.
locate: Show which peers hold a key. (stored_keys) [3 4 5]
    mooncake-p2p locate model/part-1  # Which peers hold it.
    mooncake-p2p locate model/part-1 --json  # For schedulers: every known copy.
pin: Keep objects in this peer's memory. (stored_keys) [3 4 5 6]
    mooncake-p2p pin model/part-1 model/part-2  # Evict these last, for 30 minutes.
    mooncake-p2p pin system-prompt --pin hard  # Never evict it.
    mooncake-p2p pin prompt/7 --ttl 2h  # Evict it last, for two hours.
    0: all keys are pinned
    3: keys did not exist; the others were pinned
unpin: Let objects be evicted again. (stored_keys) [3 4 5]
    mooncake-p2p unpin system-prompt  # Let it be evicted again.
    mooncake-p2p unpin model/part-1 model/part-2 --json  # Say what became of each.
    0: no key is pinned now where it could be told
    3: keys did not exist; the others were unpinned
replicate: Have N copies of an object, on as many peers. (stored_keys) [3 4 5 6]
    mooncake-p2p replicate model/part-1 -n 3  # Have it on three peers.
    mooncake-p2p replicate prompt/7 -n 2 --json  # Say how many copies there are.
    1: failed; also when there are fewer copies than were asked for
stats: Show this peer and the cluster. (stats) [4 5]
    mooncake-p2p stats  # This peer and the cluster at a glance.
    mooncake-p2p stats --watch  # The same with rates, live, until Ctrl-C.
    mooncake-p2p stats --slow  # Recent slow operations, and the time of their stages.
    mooncake-p2p stats --json  # Everything that is counted, for programs.
peers: List the members of the cluster. (stats) [4 5]
    mooncake-p2p peers  # The members of the cluster now.
    mooncake-p2p peers --all --json  # Also members that died or left today, for programs.
    mooncake-p2p peers --reads  # From whom reads come, by which transport, how fast.
doctor: Check this machine, or the way to a peer, and say cause and cure. (doctor) [4 5]
    mooncake-p2p doctor  # Check this machine; warnings and faults come with a cure.
    mooncake-p2p doctor --directory /data  # Also try the disk under /data.
    mooncake-p2p doctor --peer 10.0.0.1:17946 --cluster-key-file /etc/p2p.key
        # Check the way to a peer, step by step, and measure it.
    0: all fine, or only warnings
    1: something is broken; the findings say what, why and what to do
    4: the peer cannot be reached
support-bundle: Collect diagnostics for support, without secrets. (doctor)
    mooncake-p2p support-bundle  # All peers of this machine; prints the file's name.
    mooncake-p2p support-bundle -o help.tar.gz --log /var/log/p2pstore.log  # Also that log.
leave: Make the local peer leave the cluster and end. (stats) [4 5]
    mooncake-p2p leave  # End the local peer in good order.
    mooncake-p2p leave --drain 5s  # Within five seconds.
invite: Print one line to paste on the next machine. (keygen) [4 5]
    mooncake-p2p invite  # Print `mooncake-p2p join --invite ...` for the next machine.
    mooncake-p2p invite --without-key  # The same without the cluster key: no secret.
    mooncake-p2p invite --json | jq -r .invite > invite
        # For `ssh node2 mooncake-p2p join --detach --invite - < invite`:
        # the process list there does not show the secret.
config: Show every setting of a peer with its origin. (join)
    mooncake-p2p config show  # The settings that `mooncake-p2p join` would use here, and why.
    mooncake-p2p config show --config peer.toml --memory 8GiB  # The same for `join` with these options.
    mooncake-p2p config show --json  # The same, for programs.
keygen: Make a new cluster key. (keygen)
    mooncake-p2p keygen cluster.key  # A key for a new cluster; copy it to every machine.
    mooncake-p2p keygen --add cluster.key  # The first of three steps to another key.
    mooncake-p2p keygen --role writer --namespace jobs --from cluster.key jobs.key
        # A key for machines that read everything, and write in one namespace.
    mooncake-p2p keygen other.key --json  # Another new key, for programs.
bench: Measure the local peer, against plain memory. (bench) [4 5 6]
    mooncake-p2p bench  # 4 KiB, 1 MiB and 64 MiB, as far as they fit.
    mooncake-p2p bench --size 16MiB --size 256KiB --seconds 2  # Other sizes, for longer.
    mooncake-p2p bench --json  # For programs: results and machine.
    1: failed; also when no size fits into 5 % of the peer's free memory
bench trace: Replay a trace of requests: what a pool of peers would save. (bench_trace)
    mooncake-p2p bench trace conversation_trace.jsonl --simulate
        # Ten peers with 5,859 blocks each, as in the paper, beside private caches.
    mooncake-p2p bench trace FILE --simulate --memory 256GiB --ssd 1TiB  # Other sizes.
    mooncake-p2p bench trace FILE --simulate --json --plot hits.png  # For programs, and a picture.
checkpoint publish: Publish a directory as a checkpoint's newest version. (checkpoint) [4 5]
    mooncake-p2p checkpoint publish llama /data/llama  # The newest version of llama.
    mooncake-p2p checkpoint publish llama out --include '*.safetensors'
        # Some of the files; --dry-run says which.
    mooncake-p2p checkpoint publish llama out --wait-seeded && rm -r out
        # Keep the files until the others have all of them among them.
    mooncake-p2p checkpoint publish llama out --wait-followers 8 --timeout 5m
        # Until eight followers have it; `checkpoint update` has them use it.
    1: failed; also when a file changed meanwhile
checkpoint fetch: Fetch a checkpoint to a directory. (checkpoint) [3 4 5 6]
    mooncake-p2p checkpoint fetch llama /models/llama
        # To /models/llama/VERSION; /models/llama/current names it.
    mooncake-p2p checkpoint fetch llama@3f9c /models/llama --keep 3  # A certain version, of which three stay.
    mooncake-p2p checkpoint fetch llama . --flat --limit-rate 100MiB --wait 10m
        # Plain files, slowly, once it is published.
    1: failed; also when the disk is full
    3: no such checkpoint, or no such version
    6: no peer that has it can be reached
checkpoint follow: Follow a checkpoint. (checkpoint_groups) [4 5]
    mooncake-p2p checkpoint follow llama /models
        # Each new version; /models/current names it when `update` says so.
    mooncake-p2p checkpoint follow llama /models --exec 'systemctl reload vllm'
        # Tell the engine of each switch.
checkpoint update: Have all followers switch to a checkpoint's newest version. (checkpoint_groups) [3 4 5]
    mooncake-p2p checkpoint update llama
        # All followers switch, as soon as all of them have the newest version.
    mooncake-p2p checkpoint update llama --quorum 100 --timeout 2m
        # A hundred of them are enough, and they get two minutes.
    1: failed; also when a newer version was published meanwhile
    3: the local peer did not publish it
    5: followers are behind: none switches
checkpoint status: Show which peers have a checkpoint. (checkpoint_groups) [3 4 5]
    mooncake-p2p checkpoint status llama  # Its holders, and the progress of each.
    mooncake-p2p checkpoint status llama --watch  # Again and again.
    3: no such checkpoint
checkpoint list: List the checkpoints that are published. (checkpoint_groups) [4 5]
    mooncake-p2p checkpoint list  # Those of the default namespace.
    mooncake-p2p checkpoint list --all --json  # Of all namespaces, for programs.
checkpoint rm: Remove a checkpoint that the local peer published. (checkpoint_groups) [3 4 5]
    mooncake-p2p checkpoint rm llama  # The local peer serves it no more.
    mooncake-p2p checkpoint rm mistral --yes  # Without asking.
    3: the local peer did not publish it
demo: Watch three peers on this machine do the real thing. (demo)
    mooncake-p2p demo  # Start three peers, kill one, read everything, clean up.
    mooncake-p2p demo --memory 1GiB --blocks 64  # The same with more data.
    1: something did not work; the peers' last log lines are shown
completion: Print a script that completes commands, options and keys with Tab. (completion)
    eval "$(mooncake-p2p completion bash)"  # For ~/.bashrc.
    eval "$(mooncake-p2p completion zsh)"  # For ~/.zshrc, behind compinit.
    mooncake-p2p completion fish | source  # For ~/.config/fish/config.fish.
help: Show the help of a command. (completion)
    mooncake-p2p help get  # The same as `mooncake-p2p get --help`.
    mooncake-p2p help  # All commands.
"""
"""Each command with its summary, the module in `commands` with the function of its name, and its further exit statuses;
below it examples with their purpose behind #, and statuses that mean something else there."""
HEADING: Final = re.compile(r"^(\S[^:]*): (.*) \((\w+)\)(?: \[(.*)\])?\n((?: .*\n)+)", re.M)

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    name: (module, summary) for name, summary, module, _, _ in HEADING.findall(MANUAL)
}
"""Command -> (module with the function of that name, summary). One of two words is a command of its own."""


@dataclass(frozen=True)
class Page:
    """The end of a command's help: lines to type with their purposes, and exit statuses with their meanings."""

    examples: list[tuple[str, str]]
    statuses: list[tuple[int, str]]


def _page(further: str, body: str) -> Page:
    examples: list[tuple[str, str]] = []
    numbers = {*ALWAYS, *map(int, further.split())}
    special: dict[int, str] = {}
    for line in body.splitlines():
        status, colon, meaning = line.strip().partition(": ")
        example, _, purpose = line.strip().partition("# ")
        if colon and status.isdigit():
            special[int(status)] = meaning
        elif example:
            examples.append((example.rstrip(), purpose))
        else:  # the purpose, or more of it, on a line of its own
            line_to_type, before = examples[-1]
            examples[-1] = line_to_type, f"{before} {purpose}".lstrip()
    return Page(examples, [(each, special.get(each, MEANINGS[each])) for each in sorted(numbers)])


PAGES: Final[dict[str, Page]] = {
    name: _page(further, body) for name, _, _, further, body in HEADING.findall(MANUAL)
}
"""Command -> the end of its help."""
