"""Checkpoints for threads and plain scripts; a module of its own, as most clients need none."""

from __future__ import annotations

from p2pstore.checkpoint.client.checkpoint_calls import Checkpoints
from p2pstore.client.blocking_client import Facade, in_blocking_form


class BlockingCheckpoints(Facade):
    """The checkpoints of one blocking client. The methods are those of `Checkpoints`, plain."""

    publish = in_blocking_form(Checkpoints.publish)
    fetch = in_blocking_form(Checkpoints.fetch)
    follow = in_blocking_form(Checkpoints.follow)
    update = in_blocking_form(Checkpoints.update)
    names = in_blocking_form(Checkpoints.names)
    status = in_blocking_form(Checkpoints.status)
    wait_followers = in_blocking_form(Checkpoints.wait_followers)
    remove = in_blocking_form(Checkpoints.remove)
    forget = in_blocking_form(Checkpoints.forget)
    fetch_tensors = in_blocking_form(Checkpoints.fetch_tensors)
