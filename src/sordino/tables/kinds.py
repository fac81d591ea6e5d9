"""What kind a column is and where its numbers lie, from one noised histogram per column.

A cell falls into one of `BINS` bins: missing, a word, a text, or a number by its sign and its order of magnitude. A
record is in one bin of each column, so that adding or removing it changes one count of each column by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sordino.data.tabular import is_missing, numbers
from sordino.data.tabular_schema import FEWEST_BUCKETS, MOST_BUCKETS, Category, Column, Number, Skip, Text
from sordino.data.text import buckets_for

RATIO = 4.0
SMALLEST, LARGEST = -10, 16
EDGES = RATIO ** np.arange(SMALLEST, LARGEST + 1)
LINE = np.concatenate([-EDGES[::-1], EDGES])
"""The edges of the bins of numbers: -4^16 .. -4^-10, 4^-10 .. 4^16. What lies beyond is in the outermost bins."""
NO_VALUE, WORD, TEXT, FIRST_NUMBER = 0, 1, 2, 3
BINS = FIRST_NUMBER + len(LINE) - 1
WORDS_OF_A_TEXT = 4
CLEAR = 4.0
"""A count this many deviations above zero is no accident, even among thousands of counts."""
IN_DOUBT = 2.0
"""A count below that many deviations is more likely noise than records."""

Counts = NDArray[np.float64]


def histogram(cells: Sequence[str]) -> Counts:
    """How many cells fall into each bin."""
    values = numbers(cells)
    bins = FIRST_NUMBER + np.clip(np.searchsorted(LINE, values, side="right") - 1, 0, len(LINE) - 2)
    for place in np.flatnonzero(np.isnan(values)).tolist():
        bins[place] = _bin_of_words(cells[place])
    return np.bincount(bins, minlength=BINS).astype(np.float64)


def _bin_of_words(cell: str) -> int:
    if is_missing(cell):
        return NO_VALUE
    return TEXT if len(cell.split()) >= WORDS_OF_A_TEXT else WORD


def distinct(cells: Sequence[str]) -> int:
    """How many different values there are: adding or removing one record changes it by at most one."""
    return len({cell.strip() for cell in set(cells) if not is_missing(cell)})


def understood(counts: Counts, different: float, deviation: float, records: int, given: Column | None) -> Column:
    """The kind that most cells have by the noised `counts`, and for numbers the range in which they lie.

    A pure function of released values, the public number of records and what was `given`: it costs nothing.
    """
    low, high, mass = number_range(counts[FIRST_NUMBER:], deviation)
    if isinstance(given, Number) or mass >= max(counts[WORD], counts[TEXT]):
        if mass < CLEAR * deviation:
            return Skip("its range is lost in the noise")
        return Number(low, high, missing=bool(counts[NO_VALUE] > CLEAR * deviation))
    if max(counts[WORD], counts[TEXT]) < CLEAR * deviation:
        return Skip("its kind is lost in the noise")
    if counts[TEXT] > counts[WORD]:
        return Text(buckets_for(records))
    if different > records / 2:
        return Skip("most records have a value of their own")
    wanted = int(2 * max(different, 2.0) - 1)
    return Category(buckets=min(MOST_BUCKETS, max(FEWEST_BUCKETS, 1 << wanted.bit_length())))


def number_range(counts: Counts, deviation: float) -> tuple[float, float, float]:
    """Where the numbers are, and how many of them: (low, high, count).

    The stretch of bins with the largest sum of count - 2 deviations, widened to every bin that is clearly not empty.
    A tail of few records is left outside, where the encoding clips it.
    """
    start, stop = heaviest_stretch(counts - IN_DOUBT * deviation)
    mass = float(counts[start:stop].sum())
    clear = np.flatnonzero(counts > CLEAR * deviation)
    first, last = min([start, *clear.tolist()]), max([stop - 1, *clear.tolist()])
    return float(LINE[first]), float(LINE[last + 1]), mass


def heaviest_stretch(scores: Counts) -> tuple[int, int]:
    """(start, stop) of the contiguous stretch with the largest sum (Kadane's algorithm); never empty."""
    best, start, stop = -np.inf, 0, 1
    total, begin = 0.0, 0
    for place, score in enumerate(scores.tolist()):
        if total <= 0:
            total, begin = 0.0, place
        total += score
        if total > best:
            best, start, stop = total, begin, place + 1
    return start, stop
