"""A run as one HTML page that holds all it shows."""
