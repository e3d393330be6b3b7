"""What a trained run is worth, for each kind of data: metrics, tables and pictures."""
