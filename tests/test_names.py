"""Recipes survive a round trip through TOML; a document cannot name anything outside the package."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import sordino
from sordino import Budget, InvalidInput, Recipe, recipes
from sordino.accounting.events import find_names
from sordino.names import PARTS
from sordino.parts import Foreign

RECIPES = [
    recipes.dpsgd(batch_size=32, epochs=2.5),
    recipes.dpadam(batch_size=32, steps=7, noise_multiplier=0.1 + 0.2).for_records(100),
    recipes.automatic(batch_size=8, steps=3, sampler=Foreign()),
    recipes.dpsgd(batch_size=64, epochs=1).calibrate(Budget(epsilon=1.5, delta=1e-6), records=1000),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_round_trip_gives_an_equal_recipe(recipe: Recipe) -> None:
    again = Recipe.from_toml(recipe.to_toml())
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint()


def test_a_recipe_written_by_hand_needs_no_part_names_at_the_top() -> None:
    recipe = Recipe.from_toml('batch_size = 32\nepochs = 2.0\n[weighing]\npart = "automatic"\n')
    assert recipe.weighing == recipes.automatic().weighing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size = ", "not a TOML document"),
        ("batchsize = 3", "has no field 'batchsize'"),
        ('[weighing]\npart = "os.system"', "part='os.system': it must be one of flat, automatic"),
        ('[weighing]\npart = "private.Private"', "it must be one of flat"),
        ('[weighing]\npart = "poisson"\nrate = 0.5', "part='poisson': it must be one of flat"),
        ('[clip_schedule]\npart = "per-epoch"\nepochs = 2\n[clip_schedule.inner]\npart = "flat"', "one of constant"),
        ('[weighing]\npart = ["flat"]', "it must be one of flat"),
        ("[weighing]\ngamma = 1.0", "must name its part"),
        ("weighing = 3", "weighing=3 must be a table"),
        ('part = "flat"', "this is a Flat, not a recipe"),
        ('part = "no.such.Thing"', "part='no.such.Thing' is not known"),
        ("clip = -1.0", "clip=-1.0 must be > 0"),
        ("clip = inf", "clip=inf must be finite"),
        ("clip = nan", "clip=nan must be of type float"),
        ('clip = "1"', "clip='1' must be of type float"),
        ("clip = [1.0]", "must be of type float"),
        ("clip = true", "clip=True must be of type float"),
        ("[clip]\nx = 1", "must be of type float"),
        ("batch_size = 1.5", "batch_size=1.5 must be of type int"),
        ("name = 3", "name=3 must be of type str"),
        ("steps = 1" + 40 * "0", "must be of type int"),
        ("steps = 1" + 5000 * "0", "not a TOML document"),
        ('basis = "certain"', "basis='certain' must be one of proven"),
        ("optimizer = " + 2000 * "{inner=" + "1" + 2000 * "}", "not a TOML document"),
        ("x = " + 5000 * "[" + 5000 * "]", "not a TOML document"),
        (".".join(500 * ["clip"]) + " = 1", "more than 32 deep"),
        ("# " + 2_000_000 * "x", "more than 1,000,000 characters"),
    ],
)
def test_a_bad_document_is_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        Recipe.from_toml(text)
    assert "\n" not in str(caught.value)


def test_a_name_in_a_document_imports_nothing() -> None:
    """`part = "cli.__main__.X"` ran the program in version 0.1; a module that no table names must stay unknown."""
    code = """
import sys
from sordino import InvalidInput, Recipe
from sordino.accounting.events import find_names, from_json
from sordino.mechanisms import find_all
find_names()  # reads every file of its own package, whatever a document says
find_all()  # all of them or none, whatever a document says
before = set(sys.modules)
for name in ("cli.__main__.X", "cli.__main__", "experiments.pool.Pool", "sordino.cli.__main__:main", "antigravity.X"):
    for read, text in ((Recipe.from_toml, f'[weighing]\\npart = "{name}"'), (Recipe.from_toml, f'part = "{name}"'),
                       (from_json, '{"event":"' + name + '","fields":{}}')):
        try:
            read(text)
        except InvalidInput:
            continue
        print("accepted", name)
print(sorted(set(sys.modules) - before))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.stdout, ran.returncode) == ("[]\n", 0), ran.stderr


def test_every_name_leads_to_its_class_and_no_two_to_the_same() -> None:
    assert len(set(PARTS.places().values())) == len(PARTS.places())
    for name, place in PARTS.places().items():
        cls = PARTS.find(name)
        assert f"{cls.__module__}:{cls.__qualname__}" == place
        assert PARTS.name(cls) == name
    for old, name in PARTS.old.items():
        assert PARTS.find(old) is PARTS.find(name)
        assert PARTS.first(PARTS.find(name)) == old


def test_every_event_and_every_part_of_the_package_has_a_name() -> None:
    """A part that is written without being in the table could not be read back: add it to sordino.names."""
    package = Path(sordino.__file__).parent
    unnamed = {
        "Bounds",
        "Draw",
        "Epoch",
        "Mechanism",
        "Public",
        "Rejecting",
        "Terms",
    }  # no part by itself, or cannot be written
    files = {file for pattern in ("parts.py", "noise.py", "mechanisms/*.py") for file in package.glob(pattern)}
    assert len(files) > 10
    events = {f"{kind.__module__}:{kind.__qualname__}" for kind in find_names().values()}
    named, found = {*PARTS.places().values(), *events}, 0
    for file in sorted(package.rglob("*.py")):
        module = ".".join(("sordino", *file.relative_to(package).with_suffix("").parts))
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            event = any(ast.unparse(base) == "DpEvent" for base in node.bases)
            part = file in files and "dataclass(frozen=True)" in map(ast.unparse, node.decorator_list)
            if event or (part and node.name not in unnamed and not node.name.startswith("_")):
                found += 1
                assert f"{module}:{node.name}" in named, f"{module}.{node.name}"
    assert found > 20


def test_parts_of_the_user_stay_in_code() -> None:
    @dataclass(frozen=True)
    class Mine:
        def __call__(self, step: int, steps: int) -> float:
            return 1.0

    with pytest.raises(InvalidInput, match="only parts of Sordino"):
        Recipe(clip_schedule=Mine()).to_toml()
    assert Recipe(clip_schedule=Mine()).fingerprint()
