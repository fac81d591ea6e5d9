"""The speed benchmark drives what users run: public names, every network, every method, in processes of their own."""

from __future__ import annotations

import ast
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sordino

pytest.importorskip("opacus")

from benchmarks.speed import measuring, stacks, store
from benchmarks.speed.cases import CASES, GROWING, Virtual, collate, find_case
from benchmarks.speed.methods import METHODS, OURS, is_probed
from benchmarks.speed.starts import Runner, Wish, begin, split

ROOT = Path(__file__).parents[1]
SMALL = ("linear model, 64 inputs", "MNIST CNN 26k, 256", "Llama 2x256, LoRA")
TRIED = [
    *((SMALL[0], method) for method in METHODS),
    *((SMALL[1], method) for method in ("Sordino", "Sordino loader", "Opacus ghost", "vmap")),
    *((SMALL[2], method) for method in ("Sordino", "Opacus hooks")),
]


def tiny(name: str):
    case = CASES[name]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}: pip install 'sordino[bench]'")
    return replace(case, batch=4)


def take(name: str, method: str, folder: Path, steps: int = 2) -> list[int]:
    loop = METHODS[method](tiny(name), folder, False)
    return [next(loop)[0] for _ in range(steps)]


def imported_names(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sordino":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sordino"}
    return found


def test_the_benchmark_uses_public_names_alone():
    public = {f"sordino.{name}" for name in sordino.__all__}
    used = {path.name: imported_names(path) for path in (ROOT / "benchmarks" / "speed").glob("*.py")}
    assert used["methods.py"] == {"sordino.Private", "sordino.recipes"}
    assert used["cases.py"] == {"sordino.lab.networks"}  # definitions of networks, in the API reference
    assert set().union(*(names for file, names in used.items() if file != "cases.py")) <= public


def test_no_method_reaches_into_what_private_is_made_of():
    tree = ast.parse((ROOT / "benchmarks" / "speed" / "methods.py").read_text())
    reached = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in reached if name.startswith("_")} <= {"__init__"}
    assert not reached & {"bench", "run", "objective", "engine", "differentiate"}


@pytest.mark.parametrize("name", CASES)
def test_every_network_learns_from_one_loss_per_example(name):
    case = tiny(name)
    torch.manual_seed(0)
    model, batch = case.build(), case.draw(3)
    losses = case.loss(model, batch)
    assert losses.shape == (3,)
    assert torch.isfinite(losses).all()
    losses.sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    if case.kind == "LoRA":
        assert sum(p.numel() for p in trained) < 0.1 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.needs and "ViT" not in name])
def test_texts_are_padded_and_padding_changes_no_loss(name):
    case = tiny(name)
    batch = case.draw(64)
    if batch[0].is_floating_point():
        pytest.skip("a network of images")
    mask = batch[1]
    assert 0 < mask.float().mean() < 1
    assert mask.sum(1).min() >= mask.shape[1] // 4
    model = case.build().eval()
    few = tuple(each[:4] for each in batch)
    other = torch.where(few[1] == 1, few[0], torch.randint_like(few[0], 1, 8_000))
    with torch.no_grad():
        torch.testing.assert_close(case.loss(model, (other, *few[1:])), case.loss(model, few), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.helped and case.kind != "LoRA"])
def test_opacus_is_helped_without_changing_the_network(name):
    case = tiny(name)
    torch.manual_seed(0)
    model, batch = case.build().eval(), case.draw(3)
    with torch.no_grad():
        torch.testing.assert_close(case.helped(model, batch), case.forward(model, batch))


@pytest.mark.parametrize(("name", "method"), TRIED)
def test_every_method_takes_steps(name, method, tmp_path):
    sizes = take(name, method, tmp_path)
    assert all(size >= 0 for size in sizes)
    if method == "SGD":
        assert sizes == [4, 4]
    assert ("durable" in method) == any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SMALL])
def test_sgd_and_sordino_take_steps_on_every_network(name, tmp_path):
    assert take(name, "SGD", tmp_path) == [4, 4]
    assert len(take(name, "Sordino", tmp_path)) == 2


def test_records_are_picked_together_and_as_many_as_wanted():
    records = Virtual((torch.arange(10.0), torch.arange(10)), 10**9)
    assert len(records) == 10**9
    first, second = collate(records.__getitems__([999_999_999, 3]))
    assert first.tolist() == [9.0, 3.0]
    assert second.tolist() == [9, 3]
    assert records[13][1] == 3
    assert records.picked == 2
    assert records.__getitems__([]) == ()


def test_growing_cases_are_found_by_name_and_differ_in_one_thing():
    assert [find_case(case.name).records for case in GROWING["records"]] == [10**k for k in range(4, 10)]
    assert [case.batch for case in GROWING["batch"]] == [2**k for k in range(6, 13)]
    assert split("Sordino @ length 64", "batch 64") == ("Sordino", find_case("length 64"))


# -- measuring ------------------------------------------------------------------------------------------------------


def test_steps_are_scaled_to_the_expected_batch():
    assert measuring.find_step([(1.0, 8), (2.0, 16), (1.5, 12)], 16) == 2.0
    assert measuring.find_step([(1.0, 10), (9.0, 10), (1.2, 10)], 10) == 1.2


def test_a_turn_counts_no_probed_steps_and_takes_at_least_one():
    def loop():
        for number in range(1, 100):
            time.sleep(0.001)
            yield 4, not is_probed(number)

    steps = Runner(loop()).turn(0.0)
    assert len(steps) == 1
    assert steps[0][0] >= 0.001
    assert [number for number in range(1, 20) if is_probed(number)] == [1, 2, 4, 8, 16]


def test_peaks_are_what_a_step_adds():
    def loop():
        while True:
            torch.ones(2**22).sum()
            yield 1, True

    runner = Runner(loop())
    assert all(2**24 <= peak < 2**26 for peak in runner.peak(2))


def test_slow_peers_have_one_start():
    found = {
        "SGD": {"steps": [(1.0, 4)]},
        "Sordino": {"steps": [(1.1, 4)]},
        "Opacus hooks": {"steps": [(2.0, 4)]},
        "Opacus ghost": {"steps": [(9.0, 4)]},
        "vmap": {"steps": [(2.0, 4)], "single": True},
    }
    assert measuring.find_quick(found, 4, list(METHODS)) == ["SGD", "Sordino", "Opacus hooks"]
    slow = found | {"Sordino": {"steps": [(50.0, 4)]}}
    assert "Sordino" in measuring.find_quick(slow, 4, list(METHODS))


def test_the_figure_is_the_median_start():
    starts = [{"SGD": {"steps": [(t, 256)]}} for t in (1.0, 5.0, 2.0)]
    summary = measuring.summarise(starts, CASES["linear model, 64 inputs"])
    assert summary == {"SGD": {"seconds": 2.0, "starts": [1.0, 5.0, 2.0], "steps": 3}}


@pytest.mark.slow
def test_a_start_has_every_method_in_a_process_of_its_own():
    wish = Wish(SMALL[0], ["SGD", "Sordino", "Opacus nonsense"], turns=1, seconds=0.05, peaks=1, profile=0.2)
    said = begin(wish)
    assert set(said["found"]) == {"SGD", "Sordino"}
    assert "nonsense" in said["fails"]["Opacus nonsense"]
    for row in said["found"].values():
        assert all(seconds > 0 and examples > 0 for seconds, examples in row["steps"])
        assert row["peaks"][0] >= 0
        assert sum(row["profile"].values()) == pytest.approx(1)
    assert said["found"]["Sordino"]["profile"]["norms and sums"] > 0
    assert said["found"]["SGD"]["profile"]["norms and sums"] == 0


# -- profiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "stack"),
    [
        ("forward", ["torch/nn/functional.py f", "sordino/gradients/rules/linear.py f", "speed/cases.py loss"]),
        ("backward", ["torch/autograd/graph.py _engine_run_backward", "sordino/gradients/bookkeeping/keeper.py f"]),
        ("norms and sums", ["sordino/gradients/rules/conv.py f", "torch/autograd/__init__.py backward"]),
        ("norms and sums", ["torch/functional.py einsum", "sordino/gradients/rules/conv.py f", "sordino/step.py f"]),
        ("noise", ["sordino/noise.py f", "sordino/step.py f"]),
        ("ledger", ["sqlite3/x.py f", "sordino/accounting/store.py f", "sordino/run.py charge"]),
        ("draw and records", ["speed/cases.py __getitems__", "sordino/records.py f"]),
        ("update", ["torch/optim/sgd.py step", "speed/methods.py ordinary"]),
        ("rest", ["sordino/step.py f"]),
    ],
)
def test_a_stack_is_in_one_part(part, stack):
    frames = [(f"/somewhere/{entry.split()[0]}", entry.split()[1]) for entry in stack]
    assert stacks.find_part(frames) == part
    assert part in stacks.PARTS


def test_the_files_by_which_parts_are_told_are_there():
    for known in [*stacks.FILES, stacks.GRADIENTS]:
        if known.startswith("/sordino/"):
            assert (ROOT / "src" / known.lstrip("/")).exists(), known


def test_shares_are_of_what_was_seen():
    def work():
        parameter = torch.nn.Parameter(torch.zeros(10))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        ends = time.perf_counter() + 0.2
        while time.perf_counter() < ends:
            (parameter.sum() ** 2).backward()
            optimizer.step()

    shares = stacks.watch(work)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["update"] + shares["backward"] > 0.2
    assert shares["noise"] == 0


# -- storing --------------------------------------------------------------------------------------------------------


def test_what_was_measured_on_these_sources_is_not_measured_again(tmp_path):
    name = "linear model, 64 inputs"
    assert not store.is_current(name, tmp_path)
    store.keep(name, {"name": name, "taken": store.describe()}, tmp_path)
    assert store.is_current(name, tmp_path)
    assert list(store.read_all(tmp_path)) == [name]
    old = store.read(name, tmp_path)
    old["taken"]["sources"] = "another state"
    store.keep(name, old, tmp_path)
    assert not store.is_current(name, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_every_network_has_a_file_of_its_own():
    assert len({store.find_path(name) for name in CASES}) == len(CASES)
    assert set(OURS) < set(METHODS)


def test_a_result_says_where_it_was_measured():
    taken = store.describe()
    assert taken["versions"]["torch"] == torch.__version__
    assert taken["machine"]["cores"] >= 1
    assert json.loads(json.dumps(taken)) == taken
