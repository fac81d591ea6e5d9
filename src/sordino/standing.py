"""What the ε of a finished run is, in a few words for tables and figures."""

from __future__ import annotations


def standing(basis: str, accounting: str = "proven") -> str:
    """The basis; where the paper's own accountant proves something too, that it was this one.

    A run by the paper's accountant has another length or other noise than the run that is calibrated by ours, so the
    two never share a line even where both are proven.
    """
    return "proven, paper's accountant" if (basis, accounting) == ("proven", "published") else basis


def named(method: str, basis: str, accounting: str = "proven") -> str:
    """The method, with what its ε is unless that is proven by our accountant."""
    words = standing(basis, accounting)
    return method if words in ("", "proven") else f"{method} ({words})"
