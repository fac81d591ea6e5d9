"""Normals of random bits have the exact density, to 8 deviations; no stream is drawn twice, whoever asks."""

import copy
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from scipy import integrate, stats

import sordino.noise
from sordino import InvalidInput, bits
from sordino.accounting.ledger import Receipt
from sordino.audit.conformance.checking import check_source
from sordino.gradients.engine import add_widely
from sordino.noise import FEW, PIECE, STORE, Secure, Seeded, add_noise, count_workers, perturb

MANY = 16 * PIECE + 5
PAID = Receipt(1, GaussianDpEvent(1.0))
TABLES = bits.make_tables()
SHARES = np.bincount(TABLES.place, minlength=bits.TAIL + 1)
LEFT = np.arange(-bits.SIDE, bits.SIDE)
RECORDED_NORMALS = [0.9437048103118528, 1.8151888303806418, -0.34696916809377293]
RECORDED_UNIFORMS = [0.9288914303632293, 0.7153422611349934, 0.2864424974084955]


def normals(size: int, std: float = 1.0) -> np.ndarray:
    return Secure().gaussian(PAID, size, std).numpy()


def fits(noise: np.ndarray, std: float) -> bool:
    return bool(stats.kstest(noise / std, "norm").pvalue > 1e-6)


# -- the density, from the tables ------------------------------------------------------------------------------------


def test_the_tables_add_up_to_the_density_everywhere_within_the_columns() -> None:
    """Rectangle plus proposal times probability of keeping it is φ: for that, φ lies between the two at every place."""
    inside = np.linspace(0, 1, 201)
    x = (LEFT[:, None] + inside) * bits.WIDTH
    exact = stats.norm.pdf(x)
    base, height = TABLES.base[:-1, None], TABLES.height[:-1, None]
    assert (base <= exact).all()
    assert (exact - base <= height).all()
    rectangles = np.bincount(TABLES.column.astype(int) + 128, minlength=256)[128 + LEFT]
    assert np.array_equal(rectangles / (bits.ENTRIES * bits.WIDTH), TABLES.base[:-1]), "an entry is what its base says"
    assert np.array_equal(SHARES[:-1] * bits.UNIT / bits.WIDTH, TABLES.height[:-1]), "so is a proposal"


def test_the_rest_is_drawn_as_often_as_it_has_to_be() -> None:
    """The mass of what is kept of the proposals, over all places and the tail, is the share of entries for the rest."""
    middle = (LEFT + 0.5) * bits.WIDTH
    above = float((stats.norm.pdf(middle) - TABLES.base[:-1]).sum() * bits.WIDTH)
    rest = float((TABLES.column == bits.REST).mean())
    assert above + 2 * stats.norm.sf(bits.EDGE) == pytest.approx(rest, rel=2e-4), "the midpoint rule's error"
    exact = stats.norm.cdf(bits.EDGE) - stats.norm.cdf(-bits.EDGE) - TABLES.base[:-1].sum() * bits.WIDTH
    assert exact + 2 * stats.norm.sf(bits.EDGE) == pytest.approx(rest, rel=1e-12)


def to_words(shares: np.ndarray) -> np.ndarray:
    """Words that stand for uniform `shares` in [0, 1) of a place or a height."""
    return np.ldexp(shares - 0.5, 64).clip(-(2.0**63), 2.0**63 - 1025).astype(np.int64).view(np.uint64)


def nothing(count: int) -> np.ndarray:
    raise AssertionError(f"{count} more words were asked for, where no tail was proposed")


def test_a_proposal_is_kept_up_to_the_density_and_not_above() -> None:
    """Bits on either side of the boundary, at a dense grid of places in every column."""
    places = np.repeat(np.arange(bits.TAIL), 64).astype(np.uint8)
    inside = np.tile((np.arange(64) + 0.5) / 64, bits.TAIL)
    x = (LEFT[places] + inside) * bits.WIDTH
    limit = (stats.norm.pdf(x) - TABLES.base[places]) / TABLES.height[places]
    for beside, expected in ((-1e-9, True), (1e-9, False)):
        tried = limit + beside
        values, kept = bits.propose(places, to_words(inside), to_words(tried.clip(0, 1)), nothing)
        sure = (tried > 0) & (tried < 1)
        assert np.abs(values - x).max() < 1e-15
        assert (kept[sure] == expected).all()
        assert sure.mean() > 0.99


# -- the tail --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviations", [4.0, 4.5, 5.0, 6.0, 6.7, 7.0, 7.5, 8.0])
def test_the_tail_has_the_exact_mass_beyond(deviations: float) -> None:
    """Integrated over the bits: from all zeros to those that just reach so far, each kept with its probability."""

    def kept(share: float) -> float:
        words = np.array([max(0.0, share * 2.0**64 - 0.5)]).astype(np.uint64)
        return TABLES.tail / float(bits.reach(words)[0])

    last = np.exp((bits.EDGE**2 - deviations**2) / 2)
    found = SHARES[-1] * bits.UNIT / 2 * integrate.quad(kept, 0, last, epsabs=0, epsrel=1e-10)[0]
    assert found == pytest.approx(stats.norm.sf(deviations), rel=1e-7)


def test_a_dense_grid_of_bits_reaches_the_quantiles_of_the_tail() -> None:
    quantiles = np.linspace(bits.EDGE + 1e-6, 9.5, 20_000)
    words = (np.exp((bits.EDGE**2 - quantiles**2) / 2) * 2.0**64 - 0.5).astype(np.uint64)
    assert np.abs(bits.reach(words) - quantiles).max() < 1e-4, "the lattice is fine even at 9.5 deviations"
    near = quantiles < 8
    assert np.abs(bits.reach(words) - quantiles)[near].max() < 1e-8


def test_extreme_bits_give_finite_numbers_in_order() -> None:
    ends = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    far = bits.reach(ends)
    assert (np.diff(far) < 0).all()
    assert 10.1 < far[0] < 10.4
    assert far[-1] == pytest.approx(bits.EDGE)


def test_a_tail_is_proposed_on_both_sides_and_kept_by_its_height() -> None:
    places = np.full(4, bits.TAIL, np.uint8)
    words, heights = to_words(np.array([0.1, 0.9, 0.1, 0.9])), to_words(np.array([0.1, 0.1, 0.999, 0.999]))
    values, kept = bits.propose(places, words, heights, lambda n: np.full(n, 2**40, np.uint64))
    assert values.tolist() == [-abs(values[0]), abs(values[0]), -abs(values[0]), abs(values[0])]
    assert kept.tolist() == [True, True, False, False]


# -- columns ---------------------------------------------------------------------------------------------------------


def test_every_pattern_of_16_bits_is_one_entry_whatever_the_other_48_are() -> None:
    for low in (0, 2**48 - 1, 0x5A5A5A5A5A5A):
        words = ((np.arange(bits.ENTRIES, dtype=np.uint64) << np.uint64(48)) + np.uint64(low)).view(np.int64)
        columns, values = np.empty(bits.ENTRIES, np.int16), np.empty(bits.ENTRIES)
        bits.find_columns(TABLES, words, np.empty(bits.ENTRIES, np.intp), columns)
        assert np.array_equal(columns, TABLES.column)
        bits.place_in_columns(words, columns, values)
        assert np.abs(values * bits.FINEST - (columns + low * 2.0**-48)).max() < 2.0**-46


def test_the_lattice_is_as_fine_as_double_precision_allows() -> None:
    """Two neighbouring words differ by 2^-53 deviations in the first column: no coarser than today's ziggurat."""
    words, values = np.array([0, 1, 2], np.int64), np.empty(3)
    bits.place_in_columns(words, np.zeros(3, np.int16), values)
    assert np.array_equal(np.diff(values) * bits.FINEST * bits.WIDTH, [2.0**-53] * 2)


# -- what comes out --------------------------------------------------------------------------------------------------


def test_noise_has_the_claimed_deviation_and_no_other() -> None:
    noise = normals(200_000, 2.5)
    assert fits(noise, 2.5)
    assert not fits(noise, 2.5 * 0.95)
    assert not fits(noise, 2.5 * 1.05)


@pytest.mark.parametrize("size", [STORE, 1 << 20])
def test_bins_are_as_full_as_they_should_be(size: int) -> None:
    """Also between columns, and in the last digits of a number, where a lattice would show."""
    noise = normals(size)
    bins = np.histogram(stats.norm.cdf(noise), bins=200, range=(0, 1))[0]
    assert stats.chisquare(bins).pvalue > 1e-6
    digits = np.histogram(np.abs(noise) * 2.0**30 % 1, bins=200, range=(0, 1))[0]
    assert stats.chisquare(digits).pvalue > 1e-6
    assert len(np.unique(noise)) >= size - 2, "two of a million may agree by chance, once in many thousand runs"


def test_far_numbers_come_as_often_as_they_should() -> None:
    noise = np.abs(normals(1 << 21))
    for deviations in (3.0, bits.EDGE, 4.5):
        found, expected = int((noise > deviations).sum()), 2 * stats.norm.sf(deviations) * len(noise)
        assert stats.poisson.sf(found - 1, expected) > 1e-6
        assert stats.poisson.cdf(found, expected) > 1e-6


def test_numbers_are_independent_of_their_neighbours_and_of_other_draws() -> None:
    source = Secure()
    one, other = (source.gaussian(PAID, 1 << 19, 1.0).numpy() for _ in range(2))
    for a, b in [(one[:-lag], one[lag:]) for lag in (1, 2, 3, 4, bits.CHUNK)] + [(one, other)]:
        for change in (lambda x: x, np.abs, np.square, lambda x: np.abs(x) > 2.5, lambda x: x * 32 % 1):
            assert abs(np.corrcoef(change(a), change(b))[0, 1]) < 6 / len(a) ** 0.5


def test_the_place_in_a_column_is_independent_of_the_column() -> None:
    noise = normals(1 << 20)
    column, place = np.floor(noise * 32), noise * 32 % 1
    for wanted in (-40, -1, 0, 3, 70):
        near = place[column == wanted]
        slope = stats.norm.pdf((wanted + 1) / 32) / stats.norm.pdf(wanted / 32)
        assert abs(near.mean() - 0.5 - (slope - 1) / 12 / (1 + slope) * 2) < 6 * (1 / 12 / len(near)) ** 0.5


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, FEW - 1, FEW, FEW + 1, bits.CHUNK - 1, bits.CHUNK + 1, 70_001])
def test_any_length_is_drawn(size: int) -> None:
    noise = normals(size, 3.0)
    assert noise.shape == (size,)
    assert np.isfinite(noise).all()
    assert (noise != 0).all()
    assert len(np.unique(noise)) == size


def test_small_requests_never_get_a_number_twice() -> None:
    source = Secure()
    sizes = [1, 7, 64, 3, FEW, 999] * 12
    drawn = np.concatenate([source.gaussian(PAID, size, 1.0).numpy() for size in sizes])
    assert len(np.unique(drawn)) == len(drawn) > 3 * STORE
    assert fits(drawn, 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_precision_gets_its_noise(dtype: torch.dtype) -> None:
    tensors = [torch.zeros(150, 101, dtype=dtype), torch.zeros(0, dtype=dtype), torch.zeros((), dtype=dtype)]
    perturb(Secure(), PAID, tensors, 2.0)
    assert tensors[0].dtype == dtype
    assert abs(float(tensors[0].double().std()) / 2 - 1) < 6 / (2 * 15_150) ** 0.5
    assert tensors[2] != 0


def test_a_value_gets_noise_in_double_precision() -> None:
    noised = add_noise(Secure(), PAID, torch.zeros(5_000), 2.0)
    assert noised.dtype == torch.float64
    assert (noised.float().double() != noised).float().mean() > 0.99, "its last digits are random too"


# -- nothing twice ---------------------------------------------------------------------------------------------------

ASK: dict[str, Callable[[Secure], object]] = {
    "uniform": lambda source: source.uniform(3),
    "toss few": lambda source: source.toss(10, 0.5),
    "toss many": lambda source: source.toss(10**6, 1e-4),
    "directions": lambda source: source.directions(3),
    "gaussian": lambda source: source.gaussian(PAID, 3, 1.0),
    "gaussian of many": lambda source: source.gaussian(PAID, 2 * FEW, 1.0),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_a_forked_process_draws_nothing(ask: Callable[[Secure], object]) -> None:
    source = Secure()
    ask(source)
    if (child := os.fork()) == 0:
        try:
            ask(source)
        except InvalidInput:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ask(source)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_source_is_not_copied(again: Callable[[Secure], object]) -> None:
    with pytest.raises(InvalidInput, match="drawn twice"):
        again(Secure())


def test_threads_that_draw_at_once_have_streams_of_their_own() -> None:
    source = Secure()
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda size: source.gaussian(PAID, size, 1.0).numpy(), [20_000, 50, 5_000] * 8))
    together = np.concatenate(drawn)
    assert len(np.unique(together)) == len(together)
    assert fits(together, 1.0)


def test_a_stream_that_was_interrupted_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Secure()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bits.Normals, "draw", interrupt)
        with pytest.raises(KeyboardInterrupt):
            source.gaussian(PAID, 3, 1.0)
    assert np.isfinite(source.gaussian(PAID, 3, 1.0).numpy()).all()


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_large_model_is_noised_in_pieces_each_entry_once() -> None:
    """Every piece is asked for once, and every entry has a noise of its own."""
    asked = []

    class Counting(Secure):
        def gaussian(self, receipt: Receipt, size: int, std: float) -> torch.Tensor:
            asked.append(size)
            return super().gaussian(receipt, size, std)

    tensors = [torch.zeros(MANY, dtype=torch.float64), torch.zeros(3, 7, dtype=torch.float64)]
    perturb(Counting(), PAID, tensors, 2.0)
    flat = torch.cat([tensor.view(-1) for tensor in tensors]).numpy()
    assert sum(asked) == len(flat)
    assert max(asked) <= PIECE
    assert len(np.unique(flat)) >= len(flat) - 2, "two of millions may agree by chance"
    assert fits(flat[:: len(flat) // 100_000], 2.0)


def test_a_small_model_is_noised_at_once_each_entry_with_the_claimed_deviation() -> None:
    """Small models have a way of their own, without pieces and threads: here all tensors together are few entries."""
    source, drawn = Secure(), []
    for _ in range(50):
        tensors = [torch.zeros(shape, dtype=torch.float64) for shape in ((30, 60), (0,), (), (3, 7), (200,))]
        assert sum(tensor.numel() for tensor in tensors) <= FEW
        perturb(source, PAID, tensors, 2.0)
        drawn += [tensor.flatten() for tensor in tensors]
    flat = torch.cat(drawn).numpy()
    assert len(np.unique(flat)) == len(flat)
    assert fits(flat, 2.0)
    assert not fits(flat, 1.9)
    assert not fits(flat, 2.1)
    perturb(source, PAID, [], 2.0)


def check_threaded(source: Secure, std: float) -> np.ndarray:
    """What two threads add to a large model: which entries are the noise of another, or none; and its distribution."""
    assert count_workers(source, [torch.zeros(MANY)]) == 2
    tensors = [torch.zeros(MANY, dtype=torch.float64), torch.zeros(3, 7, dtype=torch.float64)]
    perturb(source, PAID, tensors, std)
    flat = torch.cat([tensor.view(-1) for tensor in tensors]).numpy()
    assert len(np.unique(flat)) >= len(flat) - 2, "noise was drawn twice, or left out"
    return flat


def test_two_threads_noise_each_entry_once_and_with_the_claimed_deviation(two_threads: object) -> None:
    flat = check_threaded(Secure(), 2.0)
    some = flat[:: len(flat) // 100_000]
    assert fits(some, 2.0)
    assert not fits(some, 1.9)
    assert not fits(some, 2.1)
    pieces = flat[: 4 * PIECE].reshape(4, PIECE)
    assert abs(np.corrcoef(pieces)[np.triu_indices(4, 1)]).max() < 6 / PIECE**0.5
    assert abs(flat.std() / 2.0 - 1) < 6 / (2 * len(flat)) ** 0.5


@pytest.mark.parametrize("sabotage", ["one key for all threads", "a piece left out"])
def test_threads_that_share_a_key_or_leave_a_piece_out_are_noticed(
    sabotage: str, two_threads: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the same check objects to noise that two threads draw alike, and to entries without any."""
    if sabotage == "one key for all threads":
        monkeypatch.setattr("sordino.noise.secrets.token_bytes", lambda size: bytes(size))
        together = threading.Barrier(2, timeout=20)
        draw, begun = Secure.overwrite, set[int]()

        def meet(source: Secure, receipt: Receipt, out: np.ndarray, std: float) -> torch.Tensor:
            if threading.get_ident() not in begun:  # or one thread might do all of it
                begun.add(threading.get_ident())
                with source._cipher():
                    together.wait()
                    return draw(source, receipt, out, std)
            return draw(source, receipt, out, std)

        monkeypatch.setattr(Secure, "overwrite", meet)
    else:
        split = sordino.noise._groups
        monkeypatch.setattr("sordino.noise._groups", lambda tensors: list(split(tensors))[1:])
    with pytest.raises(AssertionError, match="drawn twice, or left out"):
        check_threaded(Secure(), 2.0)


def test_what_fails_in_a_thread_fails_the_release(two_threads: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits.Normals, "draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        perturb(Secure(), PAID, [torch.zeros(MANY)], 1.0)


def test_threads_need_a_receipt_that_is_not_older_than_the_last_one(two_threads: object) -> None:
    source = Secure()
    source.gaussian(replace(PAID, sequence=2), 3, 1.0)
    with pytest.raises(InvalidInput, match="older than receipt"):
        perturb(source, PAID, [torch.zeros(MANY)], 1.0)


def test_other_sources_and_small_models_are_noised_by_one_thread(two_threads: object) -> None:
    class Own(Secure):
        """Whether it bears threads is not known."""

    large = [torch.zeros(MANY)]
    assert count_workers(Seeded(1), large) == count_workers(Own(), large) == 1
    assert count_workers(Secure(), [torch.zeros(1000)]) == 1
    assert count_workers(Secure(), [torch.zeros(MANY, dtype=torch.bfloat16)]) == 1
    torch.set_num_threads(1)
    assert count_workers(Secure(), large) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_and_noise_are_added_in_doubles_and_rounded_once(dtype: torch.dtype) -> None:
    values = torch.randn(PIECE + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    noised = values.clone()
    perturb(Seeded(3), PAID, [noised], 1e-3)
    noise = np.concatenate([(same := Seeded(3)).gaussian(PAID, PIECE, 1e-3), same.gaussian(PAID, 3, 1e-3)])
    assert torch.equal(noised, (values.double() + torch.from_numpy(noise)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_sums_of_parts_add_up_in_doubles(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    parts = [torch.full(shape, each, dtype=dtype) for each in (1.0, 2.0**-40, 2.0**-40)]
    total = parts[0]
    for part in parts[1:]:
        total = add_widely(total, part)
    assert total.dtype == torch.float64
    assert torch.equal(total, torch.full(shape, 1.0 + 2.0**-39, dtype=torch.float64))


@pytest.mark.usefixtures("two_threads")
def test_a_seeded_run_draws_the_same_with_any_number_of_threads() -> None:
    one, other = torch.zeros(MANY), torch.zeros(MANY)
    perturb(Seeded(3), PAID, [one], 1.0)
    torch.set_num_threads(1)
    perturb(Seeded(3), PAID, [other], 1.0)
    assert torch.equal(one, other)


def test_the_stream_of_a_seed_is_what_it_was() -> None:
    """Recorded before secure noise was made otherwise: a repeated experiment repeats."""
    assert Seeded(5).gaussian(PAID, 3, 1.0).tolist() == RECORDED_NORMALS
    assert Seeded(5).uniform(3).tolist() == RECORDED_UNIFORMS


def test_both_sources_conform() -> None:
    check_source(Secure, sources=64).require_passed()
    check_source(lambda: Seeded(int.from_bytes(os.urandom(8))), sources=64).require_passed()
