"""The `mooncake-p2p` command."""
