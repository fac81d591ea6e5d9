"""The papers' laboratory: datasets, features, networks, experiments, and the configurations of all of them.

`data` and `features` give records, `networks` the architectures, and `experiments` runs a method on them at an ε and
keeps what came out. Only the command line needs the laboratory.
"""
