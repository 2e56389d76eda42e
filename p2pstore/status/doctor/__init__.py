"""What `mooncake-p2p doctor` checks: this machine, the peers on it, and the way to another peer."""
