"""Features that need no training and read no other record: scattering, and normalisation without leaks.

Scattering and group normalisation treat each record alone. Statistics over records are a release:
`private_normalisation` makes it with noise, and charges the ledger for it.
"""

from __future__ import annotations

from sordino.features.normalising import ChannelNorm, group_norm, private_normalisation
from sordino.features.scattering import MissingExtra, scatter

__all__ = ["ChannelNorm", "MissingExtra", "group_norm", "private_normalisation", "scatter"]
