"""Shared parts of the scripts.

A benchmark, run by `scripts/run.py`, is a module below cost/, accuracy/ or training/. Its docstring
starts with its title. It defines

    measure(...) -> Rows      keyword options with defaults, which are those of the command
    table(rows) -> str        Markdown
    draw(png, rows)           if there is a picture
    QUICK                     options of its smallest size

Rows are written to the CSV and read back before the table and the picture are made.
"""
