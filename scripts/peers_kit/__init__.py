"""Models that `scripts/peers.py` trains next to molflt.

nets        SchNet, DimeNet++, ViSNet and PaiNN on periodic edges
ridge       descriptors, kernel ridge, the median
models      names and learning rates
jobs        training and prediction of one model
pool        the list of jobs, each run in its own process
report      tables and pictures
"""
