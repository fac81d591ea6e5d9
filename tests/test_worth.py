"""The comparison of newer mechanisms: the same search for all, and a table that says what its runs do."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import worth
from benchmarks.results import BEGIN, CHOICE, END
from sordino import recipes
from sordino.lab.experiments.results import Row, read_lines


def make_rows(scores: dict[str, tuple[float, ...]]) -> dict[str, Row]:
    """Runs on one task at ε = 1, whose second learning rate did best in the search."""
    rows = {}
    for method, found in scores.items():
        for place, rate in enumerate(worth.METHODS[method].rates):
            label = worth.name_run("mnist", 1.0, method, rate, worth.SEARCHED)
            rows[label] = {"accuracy": (0.1, 0.3, 0.2)[place]}
        for seed, accuracy in zip(worth.SEEDS, found, strict=False):
            label = worth.name_run("mnist", 1.0, method, worth.METHODS[method].rates[1], seed)
            rows[label] = {"accuracy": accuracy}
    return rows


def test_every_method_has_as_many_settings_to_choose_from_and_is_a_recipe() -> None:
    assert {len(method.rates) for method in worth.METHODS.values()} == {3}
    assert {method.clip for method in worth.METHODS.values()} == {0.5}
    assert {method.recipe.__name__ for method in worth.METHODS.values()} <= set(recipes.__all__)
    assert set(worth.YARDSTICK) <= set(worth.METHODS)


def test_runs_are_taken_in_order_and_the_report_waits_for_the_search() -> None:
    first = list(worth.list_missing({}, ["mnist"]))
    assert first[0] == ("mnist", 1.0, "dpsgd", worth.METHODS["dpsgd"].rates[0], worth.SEARCHED)
    assert {seed for *_, seed in first} == {worth.SEARCHED}
    rows = make_rows({"dpsgd": (0.9,)})
    left = [each for each in worth.list_missing(rows, ["mnist"]) if each[1:3] == (1.0, "dpsgd")]
    assert left == [("mnist", 1.0, "dpsgd", worth.METHODS["dpsgd"].rates[1], seed) for seed in worth.SEEDS[1:]]


def find_rates(score: Callable[[float], float], method: str = "dpsgd") -> tuple[list[float], float]:
    """Which learning rates a search tries, and which it ends with."""
    rows: dict[str, Row] = {}
    tried: list[float] = []
    while True:
        found = worth.search(rows, "mnist", 1.0, method)
        if (rate := found.following) is None:
            assert found.best is not None
            return tried, found.best
        tried.append(rate)
        rows[worth.name_run("mnist", 1.0, method, rate, worth.SEARCHED)] = {"accuracy": score(rate)}


def test_a_search_goes_beyond_its_edges_until_the_best_has_neighbours() -> None:
    assert find_rates(lambda rate: -abs(rate - 8)) == ([4.0, 8.0, 16.0], 8.0)
    assert find_rates(lambda rate: -abs(rate - 33)) == ([4.0, 8.0, 16.0, 32.0, 64.0], 32.0)
    assert find_rates(lambda rate: -rate) == ([4.0, 8.0, 16.0, 2.0, 1.0, 0.5, 0.25], 0.25)
    assert find_rates(lambda rate: rate)[0] == [4.0, 8.0, 16.0, 32.0, 64.0, 130.0, 260.0], "not for ever"


def test_the_others_have_momentum_where_the_yardstick_gains_by_it() -> None:
    assert "dpis, momentum" in worth.list_methods("imdb")
    assert "dpis, momentum" not in worth.list_methods("mnist")
    assert {"dpsgd", "dpis", "dpsur", "allocation"} <= set(worth.list_methods("mnist"))
    assert worth.METHODS["dpis, momentum"].options["momentum"] == 0.9


def test_a_difference_is_called_what_it_is() -> None:
    rows = make_rows(
        {
            "dpsgd": (0.900, 0.902, 0.904),
            "dpsgd, momentum": (0.880, 0.882, 0.884),
            "banded": (0.920, 0.922, 0.924),
            "blockwise": (0.850, 0.852, 0.854),
            "kalman": (0.901, 0.903, 0.906),
            "averaged": (0.95,),
        }
    )
    lines = {line.split("|")[1].strip(): line for line in worth.tabulate(rows).splitlines() if line.count("|") > 2}
    assert "90.2 ± 0.2 (3) | the yardstick" in lines["dpsgd"]
    assert "-2.0, not worth it" in lines["dpsgd, momentum"]
    assert "+2.0, worth it" in lines["banded"]
    assert "-5.0, not worth it" in lines["blockwise"]
    assert "+0.1, within the noise" in lines["kalman"]
    assert "95.0 (1) | too few runs" in lines["averaged"]
    assert "low_pass" not in lines


def test_the_page_shows_the_stored_runs_and_all_of_them_are_proven() -> None:
    stored = {row["label"]: row for row in read_lines(worth.STORED)}
    assert all(row["basis"] == "proven" and row["epsilon_spent"] <= row["epsilon"] for row in stored.values())
    _, _, rest = CHOICE.read_text(encoding="utf-8").partition(BEGIN.format("benchmarks.worth"))
    shown, _, _ = rest.partition(END)
    assert shown.strip() == worth.tabulate(stored).strip()
