"""Models, jobs and reports of `scripts/peers.py`."""
