"""An entry for the public registry of deployments of differential privacy, from a run's facts and its owner's words.

The registry (opendp.org, proposed to be hosted by NIST; Nanayakkara, Ghazi & Vadhan 2025, arXiv:2509.13509) keeps one
file per deployment. Its schema is in `assets/registry.schema.json`, which names its source; every entry is checked
against it before it is written. The registry also requires facts that no ledger knows (owner, purpose, region). The
user must give these: an entry with invented words would be worse than none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import date
from functools import cache
from importlib import resources
from typing import Any

from sordino.accounting.guarantee import read_versions
from sordino.errors import InvalidInput
from sordino.figures import round_up, round_up_digits
from sordino.report.facts import Facts

REQUIRED = ("owner", "owner_kind", "purpose", "region")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
}


def describe_deployment(facts: Facts) -> dict[str, Any]:
    """Return the entry as plain data that fits the registry's schema; an error names missing facts in one line."""
    about, g = facts.about, facts.guarantee
    if missing := [name for name in REQUIRED if not getattr(about, name)]:
        raise InvalidInput(
            f"the registry asks for {', '.join(missing)}, which no ledger knows: put what is "
            f'missing into a TOML file ({missing[0]} = "..."), and give --about FILE.toml'
        )
    if g.basis != "proven" or math.isinf(g.epsilon):
        raise InvalidInput(
            f"basis={g.basis}, epsilon={g.epsilon}: only a proven and finite guarantee can be registered"
        )
    published = about.published or _find_date(facts)
    basic = {
        "name": about.description or f"Model {facts.name}",
        "data_curators": [{"data_curator_name": about.owner, "data_curator_type": about.owner_kind}],
        "description": about.description or f"A model ({facts.setting.model}), trained on {facts.setting.data}.",
        "intended_use": about.purpose,
        "data_product_type": "Machine learning model",
        "data_product_region": about.region,
        "publication_date": published,
    }
    if about.sector:
        basic["data_product_sector"] = about.sector
    entry = {
        "url_slug": re.sub("[^a-z0-9]+", "_", f"{about.owner} {facts.name}".lower()).strip("_")[:80] or "model",
        "deployment": {
            "basic": basic,
            "dp_variant": _describe_variant(facts),
            "privacy_loss": _describe_loss(facts),
            "deployment_model": _describe_model(facts),
            "implementation": _describe_implementation(facts),
            "administrative": {
                "status": "Draft",
                "registry_authors": list(about.authors) or [about.owner],
                "tier": 3,
            },
        },
    }
    if wrong := next(find_mistakes(entry, read_schema()), None):
        raise InvalidInput(f"the entry does not fit the registry's schema: {wrong}")
    return entry


def _find_date(facts: Facts) -> str:
    """Find the day on which the run began, by its ledger."""
    try:
        return date.fromisoformat(facts.proof.began[:10]).isoformat()
    except ValueError:
        raise InvalidInput("the ledger does not say when it began: give published in --about FILE.toml") from None


def _describe_variant(facts: Facts) -> dict[str, Any]:
    unprotected = facts.guarantee.unprotected
    exact = f"Figures measured on {' and '.join(unprotected)}, exactly. " if unprotected else ""
    return {
        "variant_name": "Approximate DP" if facts.guarantee.delta else "Pure DP",
        "data_domain": f"Data sets of {facts.guarantee.units} with the columns and kinds of {facts.setting.data}.",
        "unprotected_quantities": f"{exact}The number of {facts.guarantee.units} and the names of columns.",
    }


def _describe_loss(facts: Facts) -> dict[str, Any]:
    g = facts.guarantee
    differ = {"add-or-remove-one": f"by one {g.unit} more or less", "replace-one": f"in the content of one {g.unit}"}
    loss: dict[str, Any] = {
        "privacy_unit": g.unit,
        "privacy_unit_details": f"Adjacent data sets differ {differ[g.adjacency]} ({g.adjacency}).",
        "privacy_parameters": {"epsilon": float(round_up(g.epsilon, 4)), "delta": float(round_up_digits(g.delta, 3))},
        "privacy_parameters_details": f"{g.basis}, priced by {g.accountant} from the ledger; rounded up.",
    }
    if facts.setting.records:
        loss["number_of_privacy_units"] = facts.setting.records
    return loss


def _describe_model(facts: Facts) -> dict[str, Any]:
    return {
        "model_name": "Central",
        "trust_assumptions": "Whoever trains holds the records; everybody else may see everything that was released.",
        "actors": "The curator, who trains; anybody who receives the model, noisy gradients or figures.",
        "release_type": "One release",
        "release_type_details": _describe_other_runs(facts),
        "data_source_type": "Static",
        "access_type": "Non-interactive",
    }


def _describe_other_runs(facts: Facts) -> str:
    if facts.dataset is None:
        return "Other uses of the same records are not known to this run."
    told = facts.dataset
    return f"All runs on the dataset together: epsilon = {round_up(float(told['epsilon']))} of {told['budget']}."


def _describe_implementation(facts: Facts) -> dict[str, Any]:
    g, recipe = facts.guarantee, facts.recipe
    before = ", ".join(what for what, _ in facts.used.prepared)
    tuned = next((line for line in g.assumptions if "settings" in line or "hyperparameters" in line), "not recorded")
    sums = "sums over all records with Gaussian noise" if facts.learns_table else "see the ledger"
    mechanism = sums if recipe is None else f"{recipe.name}, clipping at {recipe.clip:g}"
    noise = (
        "" if recipe is None or recipe.noise_multiplier is None else f", noise {recipe.noise_multiplier:.4g} times that"
    )
    versions = ", ".join(f"{name} {version}" for name, version in read_versions().items())
    return {
        "preprocessing_and_hyperparameter_tuning": (
            f"Released with noise and accounted for: {before or 'nothing'}. Settings: {tuned}."
        ),
        "mechanisms": f"{mechanism}{noise}; {facts.proof.events:,} events. Sordino ({versions}).",
        "composition": f"All events of the run by {g.accountant}.",
        "post_processing": "Whatever was done with noisy gradients (the optimizer, averages): it costs nothing.",
        "justification": "; ".join(g.assumptions),
        "utility": _describe_utility(facts),
        "additional_information": f"Ledger {facts.proof.fingerprint}, run {facts.proof.run_id}.",
    }


def _describe_utility(facts: Facts) -> str:
    told = [f"{figure.name} {figure.value:.3f}" for figure in facts.used.figures]
    if not told and facts.final_accuracy is not None:
        told = [f"accuracy {facts.final_accuracy:.3f}"]
    return f"On held-out records: {', '.join(told)}." if told else "Not measured."


# -- the schema -------------------------------------------------------------------------------------------------------


@cache
def read_schema() -> dict[str, Any]:
    """Read the structure of an entry, a JSON schema."""
    text = resources.files("sordino.report").joinpath("assets", "registry.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def find_mistakes(value: Any, schema: Mapping[str, Any], where: str = "entry") -> Iterator[str]:
    """Find where `value` breaks a JSON schema: types, required and unknown keys, choices, dates, fewest items.

    The registry's schema has only these rules; another rule in `schema` would be an error here.
    """
    known = {"type", "enum", "required", "properties", "additionalProperties", "items", "minItems", "format"}
    if unknown := {key for key in schema if not key.startswith("$")} - known:
        raise NotImplementedError(f"the schema has rules that are not checked: {sorted(unknown)}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{where} is {type(value).__name__}, must be {' or '.join(kinds)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}={value!r} must be one of {', '.join(map(str, schema['enum']))}"
    if schema.get("format") == "date" and not _is_date(value):
        yield f"{where}={value!r} must be a date, such as 2026-03-01"
    if isinstance(value, dict):
        yield from _find_in_object(value, schema, where)
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{where} has {len(value)} items, must have at least {schema['minItems']}"
        for place, item in enumerate(value):
            yield from find_mistakes(item, schema.get("items", {}), f"{where}[{place}]")


def _find_in_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where} lacks {name}"
    properties = schema.get("properties", {})
    for name, inner in value.items():
        if name in properties:
            yield from find_mistakes(inner, properties[name], f"{where}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{where} has no key {name!r}"


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and not (kind in ("integer", "number") and isinstance(value, bool))


def _is_date(value: Any) -> bool:
    try:
        date.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True
