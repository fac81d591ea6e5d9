"""From random bits to normals and to draws of records. Both are exact, up to the errors named here.

**Normals** are float64, many at once, from 64 bits each. The density φ is cut into columns of 1/32 deviation. 16 bits
choose a column; its share of them is a rectangle that fits under φ there. The other 48 bits choose a place in it. The
rest of the 16 bits stands for the 1.5 per cent of φ above the rectangles and beyond ±3.97 deviations, which is drawn by
rejection. Above the rectangles: a column by its share of a second table, a place in it, and a height of 64 bits, which
is compared with φ minus the rectangle. Beyond the last column: Marsaglia's tail, x = √(a² − 2·log u) kept with
probability a/x, with u of 64 bits. All shares are multiples of 2⁻²¹, so choices are exactly what the tables say. The
density that results is φ up to the rounding of φ: 10⁻¹⁶ within the columns, and a few units in the last place of φ
itself beyond them, out to 10.2 deviations, where 10⁻²⁴ is left. No number depends on another.

*What floating point gives away.* Real noise can have any value. This noise has values on a lattice: multiples of 2⁻⁵³
deviations, or of float64's spacing at its size where that is wider. Whoever sees a noised value in all its digits can
tell which exact values cannot be behind it (Mironov 2012; for Gaussians Holohan and Braghin 2021). So sums and noise
are in float64, and the noised value is rounded to the parameters' precision before it leaves. For float32, one rounded
value stands for about 2²⁹ values of float64: it can come from every exact value near it, by about equally many values
of the noise. Three things remain. A noised value that happens to be close to 0 keeps more digits below its noise: k
bits more for 2⁻ᵏ of the entries. Parameters in float64 keep all digits. And the time that a rejection takes is not
hidden. A guarantee names this as an assumption. Sums and noise on one public grid would end it, but need a new proof.

**Draws** take each of N records with probability `rate`, independently, in time and memory proportional to the draw.
The records are cut into blocks of m = 2^j with m·rate in (1/2, 1]. How many of a block join is binomial: 128 bits are
compared with the distribution, which is computed in integers of 256 bits. Which ones join is a uniform subset: j bits
for each, drawn again where two agree, which treats all records of the block alike. The last block may reach beyond N;
whatever joins there is left out, as if those records had tossed a coin too. A draw is that of N independent coins up to
2⁻¹²⁰ in total variation for each block. There are at most 2·N·rate + 1 blocks, so the error is less than 2⁻⁶⁰ for all
draws that will ever be made, far below the rounding of any δ, and nothing is charged for it. No logarithm is rounded,
and no uniform number is too coarse for a small rate, as it would be with 53 bits and gaps. Where `rate` is above 1/16,
or records are few, coins are tossed one by one, and exactly.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Fill = Callable[[NDArray[np.uint8]], None]
"""Overwrites bytes with fresh random ones."""

# -- uniforms ---------------------------------------------------------------------------------------------------------


def draw_words(fill: Fill, count: int) -> Words:
    """`count` numbers of 64 random bits."""
    words = np.empty(count, np.uint64)
    fill(words.view(np.uint8))
    return words


def to_uniforms(words: Words) -> Floats:
    """Uniforms in [0, 1), of 53 bits."""
    uniforms: Floats = (words >> np.uint64(11)).astype(np.float64)
    uniforms *= 2.0**-53
    return uniforms


# -- normals ----------------------------------------------------------------------------------------------------------

WIDTH = 2.0**-5
"""The width of a column, in deviations."""
SIDE = 127
"""Columns on each side of 0, numbered from −127 to 126."""
EDGE = SIDE * WIDTH
REST = -128
ENTRIES = 2**16
UNIT = 2.0**-21
"""The share of φ that each entry for the rest stands for."""
CHUNK = 2**15
"""Normals at a time: they need 26 bytes each, which fits in the cache of one core."""
TRIES = 2**13
"""How many proposals for the rest are made at a time; nearly half of them are kept."""
FINEST = 2.0**-48
"""The lattice of places, in columns: 2⁻⁵³ deviations."""
HIGH = 3 if sys.byteorder == "little" else 0
"""Which of the four 16-bit parts of a word is the highest."""


class Tables(NamedTuple):
    """`column` of each of 2^16 equally likely entries, or `REST`; for the rest `place`, an index of the others.

    The last place is the tail. `left`, `base` and `height` are each place's left end in columns, the height of its
    rectangle and that of the proposals above it; `tail` over x is the probability that a tail's proposal x is kept.
    """

    column: NDArray[np.int16]
    place: NDArray[np.uint8]
    left: Floats
    base: Floats
    height: Floats
    tail: float


TAIL = 2 * SIDE


def density(x: Floats) -> Floats:
    """φ, the normal density."""
    half: Floats = x * x
    half *= -0.5
    np.exp(half, out=half)
    half *= 1 / math.sqrt(2 * math.pi)
    return half


@lru_cache(maxsize=1)
def make_tables() -> Tables:
    """Make rectangles under φ, and proposals that cover φ above them; all shares are multiples of `UNIT`."""
    left = np.arange(-SIDE, SIDE)
    near, far = np.sort(np.abs([left, left + 1]), axis=0)
    lowest, highest = density(far * WIDTH), density(near * WIDTH)
    under = np.floor(lowest * (WIDTH * ENTRIES) * (1 - 2.0**-40)).astype(np.int64)
    base = under / (WIDTH * ENTRIES)
    (beyond,) = density(np.array([EDGE])).tolist()
    above = np.ceil(np.append((highest - base) * WIDTH, 2 * beyond / EDGE) / UNIT * (1 + 2.0**-40)).astype(np.int64)
    above[0] += ENTRIES - above.sum()  # more proposals than needed, for the entries that are left
    column = np.full(ENTRIES, REST, np.int16)  # 16 bits, as the part of a word that they replace
    column[: under.sum()] = np.repeat(left, under)
    return Tables(
        column=column,
        place=np.repeat(np.arange(TAIL + 1), above).astype(np.uint8),
        left=np.append(left, 0).astype(np.float64),
        base=np.append(base, 0.0),
        height=np.append(above[:-1] * (UNIT / WIDTH), 1.0),
        tail=beyond / (float(above[-1]) * UNIT / 2),
    )


class Normals:
    """Makes standard normals from the bits of `fill`; it has its own buffers, so one thread at a time may use it."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._tables = make_tables()
        self._words = np.empty(CHUNK, np.int64)
        self._entries = np.empty(CHUNK, np.intp)
        self._columns = np.empty(CHUNK, np.int16)
        self._spare = np.empty(0)

    def draw(self, out: Floats, std: float = 1.0) -> None:
        """Overwrite `out` with independent normals of deviation `std`."""
        for start in range(0, len(out), CHUNK):
            self._draw_chunk(out[start : start + CHUNK], std)

    def _draw_chunk(self, out: Floats, std: float) -> None:
        words, columns = self._words[: len(out)], self._columns[: len(out)]
        self._fill(words.view(np.uint8))
        find_columns(self._tables, words, self._entries[: len(out)], columns)
        place_in_columns(words, columns, out)
        out *= WIDTH * FINEST * std
        rest = (columns == REST).nonzero()[0]
        out[rest] = self._draw_rest(len(rest)) * std

    def _draw_rest(self, count: int) -> Floats:
        """Draw the part of φ above and beyond the rectangles; surplus numbers are kept for the next time."""
        while len(self._spare) < count:
            words = draw_words(self._fill, 2 * TRIES)
            entries = draw_words(self._fill, TRIES // 4).view(np.uint16)
            places = self._tables.place.take(entries)
            values, kept = propose(places, words[:TRIES], words[TRIES:], lambda n: draw_words(self._fill, n))
            self._spare = np.concatenate([self._spare, values.compress(kept)])
        drawn, self._spare = self._spare[:count], self._spare[count:]
        return drawn


def find_columns(tables: Tables, words: NDArray[np.int64], entries: NDArray[np.intp], out: NDArray[np.int16]) -> None:
    """Find the column of each word by its highest 16 bits; `entries` is scratch memory."""
    np.right_shift(words.view(np.uint64), 48, out=entries.view(np.uint64))
    tables.column.take(entries, out=out, mode="wrap")  # no entry is too large; other modes look first, and copy


def place_in_columns(words: NDArray[np.int64], columns: NDArray[np.int16], out: Floats) -> None:
    """Return (column + a place in [0, 1)) / `FINEST`; the column replaces a word's highest 16 bits."""
    words.view(np.int16)[HIGH::4] = columns
    np.copyto(out, words)


def propose(
    places: NDArray[np.uint8], words: Words, heights: Words, more: Callable[[int], Words]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Propose numbers above the rectangles, and say which of them are kept; `more` words are for the tail."""
    tables, where = make_tables(), places.astype(np.intp)
    offset = words.view(np.int64) * 2.0**-64
    offset += 0.5
    values = tables.left.take(where)
    values += offset
    values *= WIDTH
    height = heights.view(np.int64) * 2.0**-64
    height += 0.5
    limit = density(values)
    limit -= tables.base.take(where)
    kept = height * tables.height.take(where) < limit
    if len(tail := np.flatnonzero(where == TAIL)):
        far = reach(more(len(tail)))
        values[tail] = np.where(offset[tail] < 0.5, -far, far)
        kept[tail] = height[tail] * far < tables.tail
    return values, kept


def reach(words: Words) -> Floats:
    """√(a² − 2·log u) for a uniform u in (0, 1) of 64 bits, a the end of the last column."""
    return np.sqrt(EDGE * EDGE - 2 * np.log((words.astype(np.float64) + 0.5) * 2.0**-64))


# -- draws ------------------------------------------------------------------------------------------------------------

FEW = 2**14
"""Tossing this many coins is faster than any cleverer way."""
OFTEN = 1 / 16
"""Above this rate there are at most 16 coins to a record that joins."""
TOSSED = 2**16
"""Coins at a time: they stay in the processor's cache, and memory is that of the draw."""
FINE = 256
"""Bits of the integers in which a binomial distribution is computed."""
SHARP = 128
"""Bits that are compared with it."""


class Tossed(NamedTuple):
    """The records that join a draw, in order, and the coin of each: uniform below the rate."""

    indices: NDArray[np.int64]
    coins: Floats


def toss(records: int, rate: float, uniform: Callable[[int], Floats], words: Callable[[int], Words]) -> Tossed:
    """Let each of `records` toss a uniform coin in [0, 1) and join below `rate`; coins of the others are never made."""
    if rate > OFTEN or records <= FEW:
        return _toss_all(records, rate, uniform)
    indices = _join_blocks(records, rate, words)
    return Tossed(indices, uniform(len(indices)) * rate)


def _toss_all(records: int, rate: float, uniform: Callable[[int], Floats]) -> Tossed:
    """Toss coins one by one. If a coin equals the first 53 bits of `rate`, the bits of another coin decide."""
    scaled = rate * 2.0**53
    joined, coins = [np.empty(0, np.int64)], [np.empty(0)]
    for start in range(0, records, TOSSED):
        tossed = uniform(min(TOSSED, records - start))
        below = tossed < rate
        for tie in np.flatnonzero(tossed == math.floor(scaled) * 2.0**-53) if rate < 1 else ():
            below[tie] = uniform(1)[0] < scaled - math.floor(scaled)
        joined.append(np.flatnonzero(below) + start)
        coins.append(tossed[below])
    return Tossed(np.concatenate(joined), np.concatenate(coins))


def _join_blocks(records: int, rate: float, words: Callable[[int], Words]) -> NDArray[np.int64]:
    bits = min(62, math.floor(-math.log2(rate)))
    counts = count_joined(words(-(-records >> bits)), *spread(rate, bits), words)
    starts = (np.arange(len(counts)) << bits).repeat(counts)
    found = starts + (words(len(starts)) >> np.uint64(64 - bits)).astype(np.int64)
    found.sort()
    while len(again := (found[1:] == found[:-1]).nonzero()[0]):
        fresh = (words(len(again)) >> np.uint64(64 - bits)).astype(np.int64)
        found[again] = (found[again] >> bits << bits) + fresh
        found.sort()
    return found[: found.searchsorted(records)]


def count_joined(
    drawn: Words, shares: tuple[int, ...], first: Words, words: Callable[[int], Words]
) -> NDArray[np.int64]:
    """How many of each block join: the number of `shares` at or below a number of 128 bits, whose first 64 are `drawn`.

    `first` holds the first 64 bits of each share; only where they agree with `drawn` are the other 64 drawn.
    """
    counts = first.searchsorted(drawn)
    for tie in (first.take(counts, mode="clip") == drawn).nonzero()[0]:
        counts[tie] = bisect_right(shares, (int(drawn[tie]) << 64) + int(words(1)[0]))
    return counts


@lru_cache(maxsize=16)
def spread(rate: float, bits: int) -> tuple[tuple[int, ...], Words]:
    """Return the integers P(X ≤ k)·2^128 for k = 0, 1, ... until they reach 2^128, and their first 64 bits.

    X is binomial of 2^bits tries at `rate`. P(X = 0) is 1 − rate, squared `bits` times, which multiplies an error of
    2^−256 by 2^bits at most.
    """
    one, tries = 1 << FINE, 1 << bits
    joins = int(Fraction(rate) * one)
    stays = one - joins
    share = stays
    for _ in range(bits):
        share = share * share >> FINE
    total, shares = 0, []
    for count in range(tries + 1):
        total += share
        shares.append(min(total >> (FINE - SHARP), (1 << SHARP) - 1))
        share = share * (tries - count) * joins // ((count + 1) * stays)
        if share >> (FINE - SHARP) == 0 and count > 1:
            break
    return tuple(shares), np.array([share >> 64 for share in shares], np.uint64)
