"""A program that ends while it has blocking clients ends, whatever their threads are just doing."""

import subprocess
import sys

import pytest

from tests.cluster.processes import new_cluster
from tests.commands import ran

PROGRAM = """
import gc, sys, threading, time
from p2pstore import blocking

held = []

def while_it_has_the_lock(frame, event, argument):
    # The janitor hears that it is to stop; before it says so, the interpreter ends, and takes it along.
    if frame.f_code.co_name == "wait" and frame.f_code.co_filename == threading.__file__:
        if event == "return" and argument is True:
            held.append(True)
            time.sleep(60)
        return while_it_has_the_lock

threading.settrace(while_it_has_the_lock)
client = blocking.connect(sys.argv[1])
client.put("key", bytes(100_000))
view = client.take_lease("key")
janitor = next(each for each in threading.enumerate() if each.name == "p2pstore-janitor")
client.close()
deadline = time.monotonic() + 20
while janitor.is_alive() and not held:
    assert time.monotonic() < deadline
    time.sleep(0.01)
gc.disable()  # it is collected when the interpreter ends
client.itself = client
del client
print("ends", flush=True)
gc.enable()
"""


def test_a_client_that_is_collected_at_the_end_does_not_keep_the_program() -> None:
    with new_cluster(1, halves=False) as cluster:
        cluster.start_first()
        socket = str(cluster.peers[0].socket)
        command = [sys.executable, "-c", PROGRAM, socket]
        try:
            done = ran(command, 40)
        except subprocess.TimeoutExpired as late:
            pytest.fail(f"it said {late.stdout!r} and did not end")
        assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
