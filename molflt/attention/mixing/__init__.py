"""Sums over keys in linear time, and their quadratic reference."""
