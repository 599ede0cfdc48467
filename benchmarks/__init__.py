"""Measurements of every speed and memory claim, beside the peers, in one run: `make bench`."""
