"""Which parts are proven together, and why others are refused.

A part that needs certain others says so in its `needs`, beside the proof of its price. What a setting needs, such as
several processes or a federation, is in `SETTINGS` below. `require` checks a recipe against both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sordino.errors import InvalidInput
from sordino.parts import Always, Blockwise, Exact, Foreign, Poisson, Stretching

if TYPE_CHECKING:
    from sordino.recipe import Recipe

Setting = Literal[
    "federated",
    "units",
    "augmented",
    "sharded",
    "several processes",
    "loop",
    "loop over a foreign loader",
    "loop with workers",
]


@dataclass(frozen=True)
class Needs:
    """One rule: a recipe's `slot` must hold one of `proven`, or must not hold one of `refused`.

    `refusal` is the message, with ``{part}`` for what is in the slot, ``{kind}`` for its class and ``{owner}`` for the
    class whose rule this is. A subclass may do something other than what was proven, so it counts as a different part,
    unless `subclasses` is set. `alike` names a field that must have the same value in both parts, and `says` an
    attribute that the part's own class must have set to true.
    """

    slot: str
    refusal: str
    proven: tuple[type, ...] = ()
    refused: tuple[type, ...] = ()
    subclasses: bool = False
    alike: str = ""
    says: str = ""

    def allows(self, part: object, owner: object = None) -> bool:
        """Whether this rule of `owner` allows `part` in its slot."""
        if self.alike and getattr(part, self.alike, None) != getattr(owner, self.alike, None):
            return False
        if self.says and not vars(type(part)).get(self.says, False):
            return False
        if self.refused and isinstance(part, self.refused):
            return False
        if not self.proven:
            return True
        return isinstance(part, self.proven) if self.subclasses else type(part) in self.proven


_OWN_LOADER = (
    "a loader of your own goes with sampler=Foreign(), priced without amplification: "
    "give both, or neither to have Poisson draws"
)

SETTINGS: dict[str, tuple[Needs, ...]] = {
    "federated": (
        Needs(
            "sampler",
            "sampler={part!r} must be Poisson, or another that is proven for users who come and go: the server draws "
            "users and sees no records; leave sampler out",
            says="knows_users",
        ),
        Needs(
            "norms",
            "norms={part!r} must be Exact(): the server has whole updates and measures them",
            proven=(Exact,),
            subclasses=True,
        ),
        Needs(
            "weighing",
            "weighing={part!r} cannot be used by a server: it weighs an update as a whole; use Flat()",
            refused=(Blockwise,),
        ),
        Needs(
            "selection",
            "selection={part!r} must be Always(): a test needs private losses, which stay on the clients",
            proven=(Always,),
            subclasses=True,
        ),
        Needs(
            "rdp_filter",
            "rdp_filter={part!r} must be None: the noise of every round is fixed in advance",
            proven=(type(None),),
        ),
    ),
    "units": (
        Needs(
            "sampler",
            "sampler={kind}() cannot be used with unit=: a loader of your own deals records, not {name}s, and how many "
            "of one {name} are in a batch cannot be seen; leave sampler out to have Poisson draws of {name}s",
            refused=(Foreign,),
        ),
    ),
    "augmented": (
        Needs(
            "sampler",
            "sampler={kind}() cannot be used with augment=: a loader of your own deals batches, and which of its rows "
            "are views of one record cannot be seen; leave sampler out to have Poisson draws",
            refused=(Foreign,),
        ),
    ),
    "sharded": (
        Needs(
            "norms",
            "norms={kind} cannot be used on a sharded model: it is probed between steps, "
            "when no process holds it whole; give the bare model",
            refused=(Stretching,),
        ),
        Needs(
            "selection",
            "selection={kind} cannot be used on a sharded model: it compares losses "
            "before and after a step and keeps both models whole, which no shard can; give the bare model",
            proven=(Always,),
            subclasses=True,
        ),
    ),
    "several processes": (
        Needs(
            "sampler",
            "sampler=Foreign() cannot be used by {processes} processes: whether their loaders deal the same record "
            "to two of them cannot be seen, and it would count twice; leave sampler out to have Poisson draws",
            refused=(Foreign,),
        ),
    ),
    "loop": (Needs("sampler", _OWN_LOADER, refused=(Foreign,)),),
    "loop over a foreign loader": (Needs("sampler", _OWN_LOADER, proven=(Foreign,), subclasses=True),),
    "loop with workers": (
        Needs(
            "sampler",
            "num_workers={workers} needs Poisson draws: others depend on the model or on what was paid; use 0",
            proven=(Poisson,),
            subclasses=True,
        ),
    ),
}
"""What each setting needs beyond what the parts need; training in one process needs nothing more."""


def require(recipe: Recipe, setting: Setting | None = None, **facts: object) -> None:
    """Refuse a recipe whose parts are not proven together, or not in this setting; `facts` are for the message.

    A sampler that is not chosen yet will be Poisson, with which every part is proven.
    """
    if hasattr(recipe.norms, "check"):  # version 0.1 had such a method; nothing would call it now
        raise InvalidInput(
            f"norms={recipe.norms!r} has a method check: say what it must stand beside in `needs` instead"
        )
    for owner, rule in _list_rules(recipe, setting):
        part = getattr(recipe, rule.slot)
        unset = rule.slot == "sampler" and part is None and not rule.alike
        if not (unset or rule.allows(part, owner)):
            kinds = {"kind": type(part).__name__, "owner": type(owner).__name__}
            raise InvalidInput(rule.refusal.format(slot=rule.slot, part=part, **kinds, **facts))


def _list_rules(recipe: Recipe, setting: Setting | None) -> Iterator[tuple[object, Needs]]:
    if setting is not None:
        yield from ((None, rule) for rule in SETTINGS[setting])
        return
    for slot in ("norms", "sampler", "weighing", "noise", "selection"):
        owner = getattr(recipe, slot)
        for base in type(owner).__mro__:  # a part keeps the rules of the classes it is derived from
            yield from ((owner, rule) for rule in vars(base).get("needs", ()))
