"""The page for people who decide: what is protected, what is not, which risks remain, and two lists of questions.

The lists follow NIST SP 800-226, "Guidelines for Evaluating Differential Privacy Guarantees" (March 2025,
doi:10.6028/NIST.SP.800-226), and Opinion 28/2024 of the European Data Protection Board "on certain data protection
aspects related to the processing of personal data in the context of AI models" (17 December 2024), Sections 3.2 to 3.4.
The questions are ours. Each names the section that it comes from, and the paragraph if we could confirm it. The answers
come from the ledger and the files beside it, and name their source. Questions that no folder can answer are left open:
a page that guessed there would be worse than none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sordino.accounting import Guarantee
from sordino.figures import round_up, round_up_digits
from sordino.report.charts import percent, plain
from sordino.report.facts import Facts
from sordino.report.prices import bound_detection

NIST, EDPB = "NIST SP 800-226", "EDPB Opinion 28/2024"
WEAK = 10
"""Above this ε, nobody should be told that they are protected (NIST SP 800-226, Section 2.2)."""
LEDGER, FILES, OWNER = "the ledger", "the run’s files", "the owner"


@dataclass(frozen=True)
class OfficerAnswer:
    """A question, the run's answer, the place in the source that asks it, and who answers.

    `evidence` names where the answer was read; `OWNER` marks a question that no folder can answer and that stays open.
    """

    question: str
    answer: str
    topic: str
    evidence: str = LEDGER

    @property
    def open(self) -> bool:
        return self.evidence == OWNER


def describe_evidence(facts: Facts) -> dict[str, Any]:
    """Return what the officer's page shows in addition to the engineer's facts."""
    return {
        "protected": list_protected(facts),
        "exposed": list_exposed(facts),
        "risks": list_risks(facts),
        "evaluations": [(NIST, answer_nist(facts)), (EDPB, answer_edpb(facts))],
    }


def list_protected(facts: Facts) -> list[str]:
    """List whom the guarantee covers, in plain words; empty if it promises nothing."""
    g = facts.guarantee
    if not _promises(g):
        return []
    words = "training " if g.unprotected else ""
    lines = [f"Every {words}{g.unit}: whether it was in the data, and everything in it."]
    if g.epsilon > WEAK:
        lines[0] = f"Every {words}{g.unit}, but hardly: ε = {_write(g.epsilon)} allows almost anything to be found out."
    lines.append("Against anybody, now and later, whatever else they know and however long they compute.")
    lines.append(
        "Whatever is done with the model afterwards: publishing, querying or changing it costs no more privacy."
    )
    if facts.used.prepared:
        lines.append("What preparation found out about the columns: it was released with noise, within the same ε.")
    return lines


def list_exposed(facts: Facts) -> list[str]:
    """List what the guarantee does not cover."""
    g, lines = facts.guarantee, []
    if not _promises(g):
        lines.append(f"Any {g.unit}: no guarantee holds for this run.")
    lines += [f"{what[0].upper()}{what[1:]}: the figures measured on them are exact." for what in g.unprotected]
    lines.append("What many people have in common. A model that learns that smoking harms says so about every smoker.")
    if g.unit == "record":
        lines.append("A person with several records: for k records of one person, ε is up to k times as large.")
    lines.append("The stored records themselves: anybody who can read the file needs no model.")
    lines.append("The number of records and the names of columns. They are taken to be public.")
    return lines


def list_risks(facts: Facts) -> list[str]:
    """List the remaining risks, most serious first; each follows from something in the folder."""
    g, proof = facts.guarantee, facts.proof
    refuted = facts.audit is not None and facts.audit.get("passed") is not True
    candidates = [
        (g.basis != "proven", f"ε is {g.basis}, not proven: the true ε may be larger. Do not promise it to anybody."),
        (math.isinf(g.epsilon), "ε is infinite: what was released may reveal any record."),
        *((True, f"The guarantee holds only if {what}, and nobody has checked that.") for what in g.conditions),
        (refuted, "An audit REFUTED the claim: do not use the run before that is explained."),
        (WEAK < g.epsilon < math.inf, f"ε = {_write(g.epsilon)} is large: it promises little to any one {g.unit}."),
        (_promises(g) and bool(facts.curve), f"{_bound_attacker(facts)} That risk remains."),
        (
            bool(g.unprotected),
            "Figures on held-out records are exact: publishing them says something about the records.",
        ),
        (
            facts.dataset is None,
            "Other models or figures from the same records add to ε, and nobody keeps the total.",
        ),
        (facts.setting.seed is not None, "The noise is repeatable: anybody who knows the seed can remove it."),
        (
            proof.signature != "checked",
            "The ledger’s signature was not checked: anybody who can write to it can forge it.",
        ),
        (facts.audit is None, "The run was not audited: nobody has tried to break it."),
        (not facts.finished and bool(facts.total_steps), "The run is not finished: it may release more of its plan."),
    ]
    return [words for holds, words in candidates if holds]


def _bound_attacker(facts: Facts) -> str:
    found = percent(math.ceil(1000 * bound_detection(facts.curve, 0.01)) / 1000)
    units = facts.guarantee.units
    return f"Somebody who is wrong about 1 in 100 absent {units} can find up to {found} of those present."


def answer_nist(facts: Facts) -> list[OfficerAnswer]:
    """Answer by the components of the differential privacy pyramid of NIST SP 800-226, from the top down."""
    g, proof = facts.guarantee, facts.proof
    return [
        OfficerAnswer(
            "What are the privacy parameters, and how strong are they?",
            f"ε = {_write(g.epsilon)} at δ = {round_up_digits(g.delta, 3)}, {g.basis}. {_judge_delta(facts)}",
            "Section 2.2, the privacy parameter ε; Section 2.3, variants",
        ),
        OfficerAnswer(
            "What is the unit of privacy?",
            f"One {g.unit}; neighbouring data sets differ by {_name_difference(g)}. {_warn_of_records(g)}",
            "Section 2.4, the unit of privacy",
        ),
        OfficerAnswer(
            "Which algorithm was run, and why is its ε right?",
            f"{_name_algorithm(facts)} Its {proof.events:,} events were written down before they happened, and priced "
            f"by {g.accountant}; the proofs are in Sordino’s documentation.",
            "Section 3, algorithms and correctness: machine learning",
        ),
        OfficerAnswer(
            "Are other releases of the same data accounted for?",
            _describe_total(facts),
            "Section 2.1.2, composition; Section 2, mixing with other data releases",
        ),
        OfficerAnswer("How useful is the result?", _describe_utility(facts), "Section 3, utility and accuracy", FILES),
        OfficerAnswer(
            "Does it treat groups of people differently?",
            "Sordino does not measure this. Noise hurts small groups more: compare the figures of those that matter.",
            "Section 3, bias",
            OWNER,
        ),
        OfficerAnswer(
            "Who has to be trusted?",
            "Whoever holds the records and trains on them (the central model). Nobody else: ε holds even against "
            "somebody who sees every noisy gradient as well as the final model.",
            "Section 4, trust models",
        ),
        OfficerAnswer(
            "Is the mechanism implemented safely?",
            f"Noise: {_find(g, 'noise', 'not recorded')}. Arithmetic: {_find(g, 'floating', 'not recorded')}. "
            "Timing and other side channels of the machine are not covered; times on this page are cut to minutes.",
            "Section 4, mechanism implementation: floating point, timing",
        ),
        OfficerAnswer(
            "Who can read the records, and how are they secured?",
            "The run does not know. Differential privacy protects what is released, not what is stored.",
            "Section 4, data security and access control",
            OWNER,
        ),
        OfficerAnswer(
            "What were people exposed to when their data were collected?",
            "The run does not know.",
            "Section 4, data collection exposure",
            OWNER,
        ),
    ]


def answer_edpb(facts: Facts) -> list[OfficerAnswer]:
    """Answer what a claim of anonymity rests on (Opinion 28/2024, Section 3.2), and the opinion's other questions."""
    g = facts.guarantee
    return [
        OfficerAnswer(
            "How likely is it that personal data can be extracted from the model, or obtained by asking it?",
            _describe_extraction(facts),
            "Section 3.2, paragraph 43: likelihood of extraction, directly and through queries",
        ),
        OfficerAnswer(
            "From which sources do the training data come?",
            f"{facts.setting.data}{_count(facts)}. The owner has to say why these were chosen.",
            "Section 3.2, AI model design: selection of sources",
            FILES,
        ),
        OfficerAnswer(
            "Were the data prepared and minimised?",
            _describe_minimisation(facts),
            "Section 3.2, AI model design: preparation and minimisation",
            FILES,
        ),
        OfficerAnswer(
            "Which methods of training limit identifiability?",
            f"Differential privacy. {_name_algorithm(facts)}",
            "Section 3.2, AI model design: choices of training method",
        ),
        OfficerAnswer(
            "Are there measures on the outputs of the model?",
            "Sordino adds none, and ε needs none: it holds for the model itself, whatever anybody asks it.",
            "Section 3.2, AI model design: measures on outputs",
        ),
        OfficerAnswer(
            "Was the model analysed, and by whom?",
            f"This page was computed from the ledger ({facts.proof.fingerprint[:16]}…). The owner has to arrange "
            "an audit of the engineering, internal or external.",
            "Section 3.2, AI model analysis",
        ),
        OfficerAnswer(
            "Was it tested against attacks, such as membership inference and reconstruction?",
            _describe_tests(facts),
            "Section 3.2, paragraph 55: testing and resistance to attacks",
            FILES,
        ),
        OfficerAnswer(
            "Is that documented?",
            f"By the ledger and its chain, the recipe, this page and its seal; `sordino verify` checks them together. "
            f"The engineer’s page lists {len(g.assumptions)} assumptions.",
            "Section 3.2, paragraphs 56 to 58: documentation",
        ),
        OfficerAnswer(
            "On which legal basis are the data processed, and is the balance of interests documented?",
            "The run does not know.",
            "Section 3.3, legitimate interest",
            OWNER,
        ),
        OfficerAnswer(
            "Were the data processed lawfully when the model was developed?",
            "The run does not know.",
            "Section 3.4, consequences of unlawful processing",
            OWNER,
        ),
    ]


# -- words ------------------------------------------------------------------------------------------------------------


def _promises(g: Guarantee) -> bool:
    return g.basis == "proven" and math.isfinite(g.epsilon)


def _write(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else round_up(epsilon)


def _judge_delta(facts: Facts) -> str:
    records, delta = facts.setting.records, facts.guarantee.delta
    if not records:
        return "The number of records is not known here; δ should be well below 1 / records."
    verdict = "is" if delta < 0.5 / records else "is NOT"
    return f"δ {verdict} well below 1 / records = {plain(1 / records)}."


def _name_difference(g: Guarantee) -> str:
    one = {"add-or-remove-one": f"one {g.unit} more or less", "replace-one": f"the content of one {g.unit}"}
    return f"{one[g.adjacency]} ({g.adjacency})"


def _warn_of_records(g: Guarantee) -> str:
    if g.unit != "record":
        return "Everything that it contributed is covered together."
    return "If a person has several records, ε is larger for that person: train with --unit to protect people."


def _name_algorithm(facts: Facts) -> str:
    if facts.learns_table:
        return "Effects, one for each column, learnt from noisy sums over all records. Each sum is a Gaussian release."
    if facts.recipe is None:
        return "The folder holds no recipe: only the ledger says what was released."
    recipe = facts.recipe
    noise = "noise chosen on the way" if recipe.noise_multiplier is None else f"noise {recipe.noise_multiplier:.4g}"
    return f"The recipe {recipe.name}: clipping at {recipe.clip:g}, {noise} times that, {recipe.steps or 'some'} steps."


def _describe_total(facts: Facts) -> str:
    if facts.dataset is None:
        return (
            "Everything that this run released is. It does not know about other runs on the same records: "
            "`sordino budget` keeps one total for a dataset."
        )
    told = facts.dataset
    return (
        f"Yes: when this run reserved its share, all runs on {told['dataset']} together cost ε = "
        f"{round_up(float(told['epsilon']))} of {plain(float(told['budget']))}."
    )


def _describe_utility(facts: Facts) -> str:
    figures = {figure.name: figure for figure in facts.used.figures}
    if "auc" in figures:
        auc = figures["auc"]
        between = "" if auc.low is None or auc.high is None else f" ({auc.low:.3f} to {auc.high:.3f})"
        return f"AUC {auc.value:.3f}{between} on held-out records; guessing reaches 0.5."
    if facts.final_accuracy is not None:
        twin = facts.twin_accuracy
        beside = "" if twin is None else f", where the same model without privacy reaches {percent(twin)}"
        return f"Accuracy {percent(facts.final_accuracy)} on held-out records{beside}."
    return "Not measured: no record was held out, or no figure was stored."


def _find(g: Guarantee, word: str, otherwise: str) -> str:
    return next((line for line in g.assumptions if word in line), otherwise)


def _describe_extraction(facts: Facts) -> str:
    if not _promises(facts.guarantee):
        return "No bound is proven for this run."
    return (
        f"Bounded by proof, for the model and all queries together. {_bound_attacker(facts)} "
        "The owner has to judge whether that is insignificant."
    )


def _count(facts: Facts) -> str:
    return "" if not facts.setting.records else f", {facts.setting.records:,} {facts.guarantee.units} to train on"


def _describe_minimisation(facts: Facts) -> str:
    used = facts.used
    if not used.columns:
        return "The run does not tell columns apart. Its folder holds numbers and names, but no records."
    left = f", {len(used.left_out)} left out" if used.left_out else ""
    return f"Columns used: {len(used.columns)}{left}. No record is in the run’s folder."


def _describe_tests(facts: Facts) -> str:
    if facts.audit is None:
        return "Not yet. `sordino audit` attacks the run, and the next page shows the result."
    verdict = "not refuted" if facts.audit.get("passed") is True else "REFUTED"
    if "releases" in facts.audit:
        return f"Replayed with and without single records, {facts.audit['releases']} releases: {verdict}."
    return f"{len(facts.audit.get('attacks', []))} attacks on its mechanism: {verdict}. Passing proves nothing."
