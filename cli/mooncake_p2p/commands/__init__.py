"""The commands, one function each, named like the command."""
