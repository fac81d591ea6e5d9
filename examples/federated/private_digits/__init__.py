"""A Flower app with user-level differential privacy."""
