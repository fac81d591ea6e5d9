"""Features that need no training and read no other record: scattering, and normalisation without leaks.

Scattering and group normalisation treat each record alone. Statistics over records are a release:
`private_normalisation` makes it with noise, and charges the ledger for it.
"""

from __future__ import annotations

from sordino.lab.features.scattering import MissingExtra, scatter
from sordino.tables.normalising import ChannelNorm, group_norm, private_normalisation

__all__ = ["ChannelNorm", "MissingExtra", "group_norm", "private_normalisation", "scatter"]
