"""Names: 20,074 surnames in 18 languages, one file each (S. Robertson, practical-pytorch), as bytes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from sordino.errors import InvalidInput
from sordino.lab.data import cache
from sordino.lab.data.download import DataUnavailable, Remote
from sordino.tables.dataset import Data, Preprocessing, split, spread

OFFICIAL = Remote("https://download.pytorch.org/tutorial/data.zip")
COUNT, LANGUAGES = 20_074, 18
PAD, START, END, OFFSET = 0, 1, 2, 3
SHORTEST = 3
HELD_OUT = Preprocessing(
    "a fixed fifth of each language held out, by the number of its names",
    reads_private=True,
    alternative="hold names out by their own bytes, as `sordino train` does with files",
)


def load_names(length: int = 24) -> Data:
    """Token ids [N, length]: start, bytes + 3, end, padded with 0 on the left so that the last step has read the name.

    A fixed fifth of each language is held out. Which names these are depends on how many names the language has: one
    more private name moves others, and no guarantee covers that. No checksum is published for the archive, so the
    number of names and languages is checked instead.
    """
    if length < SHORTEST:
        raise InvalidInput(f"length={length} must be >= {SHORTEST}: start, a byte and end; try 24")
    texts = _read_names()
    if (found := (len(texts), sum(map(len, texts.values())))) != (LANGUAGES, COUNT):
        raise DataUnavailable(
            f"names has (languages, names) = {found}, must be {(LANGUAGES, COUNT)}: replace the files"
        )
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "test": []}
    for label, language in enumerate(sorted(texts)):
        tokens = torch.stack([encode_name(name, length) for name in texts[language]])
        for part, index in zip(parts.values(), split(len(tokens)), strict=True):
            part.append((tokens[index], torch.full((len(index),), label)))
    steps = (Preprocessing(f"bytes of each name, cut at {length - 2}"), HELD_OUT)
    return Data("names", _mix(parts["train"]), _mix(parts["test"]), tuple(sorted(texts)), steps)


def encode_name(name: str, length: int) -> Tensor:
    """One name as token ids."""
    content = [byte + OFFSET for byte in name.encode()[: length - 2]]
    tokens = [START, *content, END]
    return torch.tensor([PAD] * (length - len(tokens)) + tokens)


def _read_names() -> dict[str, list[str]]:
    """Names by language, from a folder of text files or from the official archive."""
    source = cache.obtain("names", OFFICIAL, "English.txt")
    if source.name != OFFICIAL.name:
        files = {path.stem: path.read_bytes() for path in source.parent.glob("*.txt")}
    else:
        try:
            with zipfile.ZipFile(source) as content:
                members = [m for m in content.namelist() if m.startswith("data/names/") and m.endswith(".txt")]
                files = {Path(member).stem: content.read(member) for member in members}
        except zipfile.BadZipFile as error:
            raise DataUnavailable(f"{source} is not a whole zip file ({error}): delete it and load again") from error
    return {language: [name for name in text.decode().split("\n") if name] for language, text in files.items()}


def _mix(parts: list[tuple[Tensor, Tensor]]) -> TensorDataset:
    tokens, classes = (torch.cat(list(column)) for column in zip(*parts, strict=True))
    order = spread(len(classes))
    return TensorDataset(tokens[order], classes[order])
