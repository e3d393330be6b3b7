"""Helpers shared by several scripts.

`scripts/run.py` runs the benchmarks, which are the modules in cost/, accuracy/ and training/. The
first line of a module's docstring is the title. A module defines

    measure(...) -> Rows      its arguments need defaults and become command-line options
    table(rows) -> str        formats the rows as Markdown
    draw(png, rows)           optional; draws a figure
    QUICK                     arguments of `measure` for the smallest size

Rows are written to a CSV file and read back before the table and the figure are made.
"""
