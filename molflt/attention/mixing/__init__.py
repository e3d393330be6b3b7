"""How tokens mix: sums over keys in linear time, and their quadratic oracle."""
