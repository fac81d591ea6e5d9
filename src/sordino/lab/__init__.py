"""The papers' laboratory: datasets, features, networks, experiments, and their configurations.

`data` and `features` give records, `networks` gives architectures, and `experiments` runs a method on them at an ε and
keeps the results. Only the command line needs the laboratory.
"""
