"""The bytes of messages that must never change, in files of the folder `golden`: hexadecimal, by name."""

from pathlib import Path


def golden(name: str) -> dict[str, str]:
    """The lines `MESSAGE: BYTES` of a file."""
    lines = (Path(__file__).with_name("golden") / f"{name}.txt").read_text().splitlines()
    return dict(line.rsplit(": ", 1) for line in lines)
