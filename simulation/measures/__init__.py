"""Figures of gossip, measured in virtual time: one module each, with `SIZES`, perhaps `QUICK_SIZES`
and `PARTS`, and `measure`."""
