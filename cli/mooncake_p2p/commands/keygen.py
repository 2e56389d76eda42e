"""`keygen`: the key that all peers of one cluster share."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from mooncake_p2p.errors import CommandFailed
from mooncake_p2p.options import Json
from mooncake_p2p.output import print_json, remark


def keygen(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Where to write it; must be new.", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Make a new cluster key: 32 random bytes in hexadecimal, in a file that only you can read.

    Give the file to every peer of the cluster with `join --cluster-key-file FILE`.
    """
    from p2pstore.keyring import new_cluster_key

    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise CommandFailed(
            f"{file} exists and was left alone, because a key that is lost cannot be made again; "
            "choose another name"
        ) from None
    except OSError as error:
        raise CommandFailed(f"cannot write {file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as out:
        os.fchmod(out.fileno(), 0o600)  # whatever the umask
        out.write(new_cluster_key() + "\n")
    if json:
        print_json({"file": file})
    else:
        remark(f"wrote {file}; copy it to every machine and join with --cluster-key-file {file}")
