"""A page says which ledger it belongs to and can be checked against it: a seal at its end, signed if there is a key.

The seal is a block of JSON: the run, how many events its ledger held and where its chain ended, the guarantee that the
page states, and the SHA-256 of the page without the seal. If someone alters a page but not its seal, the digest shows
it. If someone alters both, the ledger shows it, because the guarantee is priced again from there. With a key,
HMAC-SHA256 over the seal also says that someone with the key made the page (`sordino.accounting.chain`). It is made
only if the ledger itself carries that key's signatures, so that nobody gets a signed page for another ledger.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.accounting.chain import Key, find_key
from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from sordino.report.facts import Facts

KIND = "sordino-seal-1"
MOST_BYTES = 32_000_000
_BLOCK = re.compile(r'<script type="application/json" id="seal">(.*?)</script>\n', re.DOTALL)
_CLAIMS = ("epsilon", "delta", "basis", "unit", "adjacency", "accountant", "unprotected", "conditions")


@dataclass(frozen=True)
class PageSeal:
    """What a page says about itself, and whether its text is what was sealed."""

    content: Mapping[str, Any]
    whole: bool

    @property
    def signed_by(self) -> str | None:
        """The name of the key, if the page claims a signature."""
        name = self.content.get("key")
        return name if isinstance(name, str) else None

    def check(self, key: Key) -> bool:
        """Whether `key` signed it."""
        signature = self.content.get("signature")
        if not isinstance(signature, str) or not re.fullmatch("[0-9a-f]{64}", signature):
            return False
        return key.check(_spell(self.content), bytes.fromhex(signature))


def seal_page(html: str, facts: Facts, reader: str) -> str:
    """Return the page with its seal, right before its end."""
    proof, claims = facts.proof, facts.guarantee.to_dict()
    content: dict[str, Any] = {
        "kind": KIND,
        "reader": reader,
        "run": proof.run_id,
        "events": proof.charged,
        "head": proof.head,
        "guarantee": {name: claims[name] for name in _CLAIMS},
        "digest": _digest(html),
    }
    key = find_key() if proof.signature == "checked" else None
    if key is not None:
        content["key"] = key.name
        content["signature"] = key.sign(_spell(content)).hex()
    # A text from the folder, such as the name of a unit, must not end the block.
    text = json.dumps(content, ensure_ascii=True).replace("<", "\\u003c")
    block = f'<script type="application/json" id="seal">{text}</script>\n'
    before, end, after = html.rpartition("</body>")
    return f"{before}{block}{end}{after}"


def read_seal(path: Path) -> PageSeal:
    """Read the seal of a page that may come from anybody."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot read page {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"page {path} is not UTF-8: give a page that `sordino report` made") from None
    found = _BLOCK.findall(text)
    if len(found) != 1:
        raise InvalidInput(f"page {path} has {len(found)} seals, must have 1: give a page that `sordino report` made")
    try:
        content = json.loads(found[0])
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise InvalidInput(f"page {path} has a seal that cannot be read: give a page that `sordino report` made")
    return PageSeal(content, content.get("digest") == _digest(_BLOCK.sub("", text)))


def find_contradiction(seal: PageSeal, facts: Facts) -> str | None:
    """Find what the page claims and its ledger, priced again, does not; None if they agree."""
    claimed, stated = seal.content.get("guarantee"), facts.guarantee.to_dict()
    if not isinstance(claimed, dict):
        return "it states no guarantee"
    for name in _CLAIMS:
        if not _agree(claimed.get(name), stated[name]):
            return f"it says {name} = {str(claimed.get(name))[:80]}, the ledger {str(stated[name])[:80]}"
    return None


def _agree(ours: object, theirs: object) -> bool:
    if isinstance(ours, float | int) and isinstance(theirs, float | int):
        return abs(ours - theirs) <= 1e-6 * max(1e-12, abs(theirs))  # versions of a library may round differently
    return ours == theirs


def _digest(html: str) -> str:
    return hashlib.sha256(html.encode()).hexdigest()


def _spell(content: Mapping[str, Any]) -> bytes:
    """Spell what is signed: everything but the signature, after words that no row of a ledger begins with."""
    kept = {name: value for name, value in content.items() if name != "signature"}
    return b"sordino report\0" + json.dumps(kept, sort_keys=True, ensure_ascii=True).encode()
