"""The `molflt` command line."""
