"""Models that `scripts/peers.py` trains next to molflt."""
