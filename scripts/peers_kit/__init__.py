"""Models that `scripts/peers.py` trains next to molflt.

nets        SchNet, DimeNet++, ViSNet and PaiNN on periodic edges
ridge       descriptors, kernel ridge, the median
jobs        one job: its description, its models, its result
training    steps within a budget of CPU time
pool        which jobs there are, and running them in processes of their own
report      tables and pictures
"""
