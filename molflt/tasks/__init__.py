"""What is learned: a loss, and the sums that become metrics, for each kind of data."""
