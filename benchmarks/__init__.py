"""Speed and memory against peers, and the tables of the papers."""
