"""Evaluation of trained runs: metrics, tables and figures for each kind of data.

Every `evaluate` function takes the folder of a run, its model in evaluation mode, its
configuration, an empty folder for files, and the options of ``molflt evaluate`` for its recipe.
"""
