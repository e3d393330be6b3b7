"""Shared parts of the benchmarks that `scripts/run.py` runs.

A benchmark is a module below cost/, accuracy/ or training/. Its docstring begins with its title,
and it has

    measure(...) -> Rows      keyword options with defaults, which are the command's
    table(rows) -> str        Markdown
    draw(png, rows)           if it has a picture
    QUICK                     options of its smallest size
    PROMISES                  what has to hold of the rows

Rows go through the CSV before anything else reads them, so that table, picture and promises can be
made again without measuring.
"""
