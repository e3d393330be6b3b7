"""The `molflt` command line: what a user types, in terms of the rooms below."""
