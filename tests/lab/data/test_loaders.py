"""Every loader: the real sets where SORDINO_DATA has them, tiny imitations of the official archives elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import struct
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sordino.errors import InvalidInput
from sordino.lab import data
from sordino.lab.data import cifar10, imdb, surnames, vocabulary
from sordino.lab.data.download import DataUnavailable, Remote
from sordino.lab.data.mnist import read_idx
from sordino.tables.dataset import split, spread, tensors


def test_digits_are_here_without_any_download(empty_machine: Path) -> None:
    digits = data.load("digits")
    x, y = digits.train
    assert (tuple(x.shape), tuple(digits.test[0].shape)) == ((1438, 1, 8, 8), (359, 1, 8, 8))
    assert (x.min().item(), x.max().item()) == (0.0, 1.0)
    assert digits.test[1].bincount().min() >= 30, "every class is held out in fair number"
    assert y[:200].bincount(minlength=10).min() >= 10, "a prefix has all classes"
    assert digits.caveats == ()
    assert torch.equal(data.load("digits").train[0], x)


@pytest.mark.parametrize("count", [1, 2, 5, 10, 73, 1797, 25_000, 60_000])
def test_the_fixed_split_is_a_partition_of_all_records(count: int) -> None:
    train, held_out = split(count)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(count))
    assert len(held_out) == count // 5
    assert sorted(spread(count).tolist()) == list(range(count))


def test_unknown_sets_and_options_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"data='svhn' is not known: choose one of cifar10, digits, "):
        data.load("svhn")
    with pytest.raises(InvalidInput, match="vocabulary='bert' must be one of keras, glove, hashed"):
        data.load("imdb", vocabulary="bert")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imdb", {"vocabulary": "hashed", "words": 3}, r"words=3 must be >= 4: "),
        ("imdb", {"words": 2}, r"words=2 must be >= 4: "),
        ("imdb", {"length": 0}, r"length=0 must be >= 1: "),
        ("names", {"length": 1}, r"length=1 must be >= 3: "),
        ("names", {"length": 2}, r"length=2 must be >= 3: "),
    ],
)
def test_options_out_of_range_are_one_line_before_anything_is_read(
    empty_machine: Path, name: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        data.load(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocabulary", ["keras", "glove"])
def test_a_table_of_vectors_has_a_row_for_every_special_token(empty_machine: Path, vocabulary: str) -> None:
    with pytest.raises(InvalidInput, match="words=3 must be >= 4"):
        imdb.glove_embedding(vocabulary, words=3)


def test_the_fewest_words_and_letters_have_ids_inside_the_table(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitation(empty_machine, monkeypatch)
    for name in vocabulary.VOCABULARIES:
        assert data.load("imdb", vocabulary=name, words=4, length=1).train[0].max() < 4
    assert len(imdb.glove_embedding(words=4)) == 4
    assert surnames.encode_name("Ada", 3).tolist() == [1, ord("A") + 3, 2]


def test_an_absent_set_says_where_it_was_to_come_from(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surnames, "OFFICIAL", Remote("http://127.0.0.1:9/data.zip"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(DataUnavailable, match=r"data\.zip cannot be fetched from .*: go online, or set SORDINO_DATA"):
        data.load("names")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_sets(benchmark_folder: Path, name: str) -> None:
    loaded = data.load(name)
    x, y = loaded.train
    assert (tuple(x.shape), len(loaded.test[1])) == ((60_000, 1, 28, 28), 10_000)
    assert (x.dtype, x.min().item(), x.max().item()) == (torch.float32, 0.0, 1.0)
    published = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}[name]
    assert (x.mean().item(), x.std().item()) == pytest.approx(published, abs=1e-4)
    assert len(loaded.classes) == len(y.unique()) == 10


def test_normalisation_by_dataset_statistics_is_a_caveat(benchmark_folder: Path) -> None:
    private = data.load("mnist", normalise="dataset")
    assert private.train[0].mean().abs() < 1e-3
    assert len(private.caveats) == 1
    assert "normalise='unit'" in private.caveats[0]
    public = data.load("mnist", normalise="centred")
    assert public.caveats == ()
    assert (public.test[0].min().item(), public.test[0].max().item()) == (-1.0, 1.0)
    with pytest.raises(InvalidInput, match="normalise='z' must be one of unit, centred, dataset"):
        data.load("mnist", normalise="z")


@pytest.mark.slow
def test_cifar10_is_the_official_bytes(benchmark_folder: Path) -> None:
    """`load` refuses other bytes than the official batches, so loading at all is the test of the decoding."""
    loaded = data.load("cifar10", normalise="unit")
    x, y = loaded.train
    assert tuple(x.shape) == (50_000, 3, 32, 32)
    assert y.bincount().tolist() == [5000] * 10
    assert x.mean(dim=(0, 2, 3)).tolist() == pytest.approx(cifar10.PUBLISHED[0], abs=1e-4)
    assert data.load("cifar10").caveats == ()
    assert len(data.load("cifar10", normalise="dataset").caveats) == 1


def cifar_archive(path: Path, batches: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in batches.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_cifar10_from_the_official_archive(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 10, (4, 3073), dtype=np.uint8) for name in cifar10.MD5}
    batches = cifar10._read_archive(
        cifar_archive(tmp_path / "c.tar.gz", {name: row.tobytes() for name, row in rows.items()})
    )
    assert all(np.array_equal(batches[name], rows[name]) for name in cifar10.MD5)
    with pytest.raises(DataUnavailable, match="lacks data_batch_1, "):
        cifar10._read_archive(cifar_archive(tmp_path / "d.tar.gz", {"test_batch": b"\0" * 3073}))


def test_cifar10_refuses_other_bytes(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_machine.joinpath("cifar10").mkdir(parents=True)
    wrong = {name: bytes(3073) for name in cifar10.MD5}
    path = cifar_archive(empty_machine / "cifar10" / cifar10.OFFICIAL.name, wrong)
    monkeypatch.setattr(cifar10, "OFFICIAL", Remote(f"http://127.0.0.1:9/{path.name}"))
    with pytest.raises(DataUnavailable, match=r"cifar10/data_batch_1 has md5 .* must be 5dd7"):
        data.load("cifar10")


def test_cifar10_of_sordino_data_comes_before_what_was_decoded(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(folder: Path, value: int) -> None:
        (folder / "cifar10").mkdir(parents=True, exist_ok=True)
        cifar_archive(folder / "cifar10" / "c.tar.gz", {name: bytes([value]) * 3073 for name in cifar10.MD5})

    def loaded() -> int:
        return int(cifar10._decode_once()["classes"][0])

    monkeypatch.setattr(cifar10, "OFFICIAL", Remote("http://127.0.0.1:9/c.tar.gz"))
    for value in (1, 2):
        content = np.full((1, 3073), value, np.uint8).tobytes()
        monkeypatch.setattr(cifar10, "MD5", dict.fromkeys(cifar10.MD5, hashlib.md5(content).hexdigest()))
        put(empty_machine if value == 1 else tmp_path / "given", value)
        if value == 2:
            monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "given"))
        assert loaded() == value
        assert loaded() == value, "decoded once, and found again"
    put(tmp_path / "given", 3)
    with pytest.raises(DataUnavailable, match="cifar10/data_batch_1 has md5"):
        loaded()
    monkeypatch.delenv("SORDINO_DATA")
    assert loaded() == 1


def test_cifar10_pictures_that_are_none_are_named(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "given" / "cifar10").mkdir(parents=True)
    np.save(tmp_path / "given" / "cifar10" / "labels.npy", np.zeros(60_000, np.uint8))
    (tmp_path / "given" / "cifar10" / "data_batch_1.webp").write_bytes(b"no picture")
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "given"))
    with pytest.raises(DataUnavailable, match=r"cifar10 holds no batch data_batch_1 .*: replace the files"):
        data.load("cifar10")


def test_idx_files_are_checked(tmp_path: Path) -> None:
    good = struct.pack(">BBBBII", 0, 0, 8, 2, 2, 3) + bytes(range(6))
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(good))
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    for bad in (gzip.compress(good[:-1]), gzip.compress(b"\1" + good[1:]), gzip.compress(good)[:-6], b"plain"):
        path.write_bytes(bad)
        with pytest.raises(DataUnavailable, match="delete it and load again"):
            read_idx(path)


def test_names(benchmark_folder: Path) -> None:
    loaded = data.load("names")
    tokens, classes = loaded.train
    assert len(classes) + len(loaded.test[1]) == 20_074
    assert len(loaded.classes) == 18
    assert loaded.test[1].bincount(minlength=18).min() >= 14
    assert (tokens[:, -1] == surnames.END).all(), "padding is on the left: the last step has read the whole name"
    assert tokens.max() < 259
    (caveat,) = loaded.caveats
    assert "a fixed fifth of each language held out, by the number of its names (instead: " in caveat


def test_a_name_is_its_bytes() -> None:
    assert surnames.encode_name("Ã", 6).tolist() == [0, 0, 1, 0xC3 + 3, 0x83 + 3, 2]
    assert surnames.encode_name("abcdefgh", 6).tolist() == [1, *(ord(c) + 3 for c in "abcd"), 2]


def test_names_from_the_official_archive(empty_machine: Path) -> None:
    folder = empty_machine / "names"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "data.zip", "w") as archive:
        for language in range(18):
            count = 20_074 - 17 * 5 if language == 0 else 5
            archive.writestr(f"data/names/L{language:02}.txt", "Ok\n" * count)
        archive.writestr("data/eng-fra.txt", "not a name\n")
    loaded = data.load("names", length=8)
    assert len(loaded.train_set) + len(loaded.test_set) == 20_074  # type: ignore[arg-type]
    (folder / "data.zip").write_bytes(b"no zip")
    with pytest.raises(DataUnavailable, match="not a whole zip file"):
        data.load("names")


@pytest.mark.slow
def test_imdb(benchmark_folder: Path) -> None:
    loaded = data.load("imdb")
    tokens, classes = loaded.train
    assert tuple(tokens.shape) == (25_000, 80)
    assert classes.bincount().tolist() == [12_500, 12_500]
    assert (tokens[:, 0] == 1).all()
    assert tokens.max() < 20_000
    assert abs(classes[:1000].float().mean() - 0.5) < 0.05, "reviews are mixed"
    assert "vocabulary='glove'" in loaded.caveats[0]
    public = data.load("imdb", vocabulary="hashed", words=5000, length=32)
    assert public.caveats == ()
    assert public.train[0].max() < 5000
    assert torch.equal(public.train[1], classes)


def test_keras_ranks_of_a_known_sentence(benchmark_folder: Path) -> None:
    code = vocabulary.make_coder("keras")
    assert code("The the, THE movie! xyzzyqq") == [1, 1, 1, 17, 0]


def test_glove_rows_follow_the_token_ids(benchmark_folder: Path) -> None:
    rows = imdb.glove_embedding()
    assert tuple(rows.shape) == (20_000, 100)
    assert rows[:4].abs().sum() == 0
    with np.load(benchmark_folder / "glove" / vocabulary.EXCERPT) as stored:
        for rank in (1, 17, 19_996):
            np.testing.assert_array_equal(rows[rank + 3], stored["vectors"][rank].astype(np.float32))
        counted = stored["words"].tolist()
        want = (stored["vectors"][counted.index("do")].astype(float) + stored["clitic_vectors"][0]) / 2
    np.testing.assert_allclose(rows[counted.index("don't") + 3], want, atol=1e-6)


def imitation(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The official IMDb archive, word index and GloVe file, in small."""
    reviews = {"neg/2_1": "bad, bad film", "neg/10_4": "don't", "pos/0_9": "Good film", "pos/1_10": "good unheard"}
    (cache / "imdb").mkdir(parents=True)
    with tarfile.open(cache / "imdb" / "reviews.tar.gz", "w:gz") as archive:
        for split_name in ("train", "test"):
            for name, text in reviews.items():
                member = tarfile.TarInfo(f"aclImdb/{split_name}/{name}.txt")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setattr(imdb, "OFFICIAL", Remote("http://127.0.0.1:9/reviews.tar.gz"))
    (cache / "imdb" / "index.json").write_text(json.dumps({"film": 2, "bad": 1, "good": 3, "don't": 4}))
    monkeypatch.setattr(vocabulary, "WORD_INDEX", Remote("http://127.0.0.1:9/index.json"))
    (cache / "glove").mkdir()
    with zipfile.ZipFile(cache / "glove" / "glove.zip", "w") as archive:
        lines = [f"{word} " + " ".join([str(i)] * 100) for i, word in enumerate(["film", "n't", "do", "good"], 1)]
        archive.writestr(vocabulary.MEMBER, "\n".join(lines) + "\n")
    monkeypatch.setattr(vocabulary, "GLOVE", Remote("http://127.0.0.1:9/glove.zip"))


def by_review(loaded: data.Data) -> dict[tuple[int, ...], int]:
    return {tuple(row.tolist()): int(label) for row, label in zip(*loaded.train, strict=True)}


def test_imdb_from_the_official_files(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitation(empty_machine, monkeypatch)
    keras = data.load("imdb", words=8, length=4)
    assert by_review(keras) == {(1, 4, 4, 5): 0, (1, 7, 0, 0): 0, (1, 6, 5, 0): 1, (1, 6, 2, 0): 1}
    public = data.load("imdb", vocabulary="glove", words=8, length=4)
    assert public.caveats == ()
    assert by_review(public) == {(1, 2, 2, 4): 0, (1, 6, 5, 0): 0, (1, 7, 4, 0): 1, (1, 7, 2, 0): 1}
    assert imdb.glove_embedding("glove", words=8)[4:, 0].tolist() == [1, 2, 3, 4]
    assert imdb.glove_embedding("keras", words=8)[4:, 0].tolist() == [0, 1, 4, 2.5]
    fewer = data.load("imdb", words=6, length=4)
    assert max(map(max, by_review(fewer))) == 5
    with pytest.raises(InvalidInput, match="hashed words have no vectors"):
        imdb.glove_embedding("hashed")


def excerpt(folder: Path) -> None:
    """The excerpt of the reviews' words, which does not know "do" and has other vectors."""
    (folder / "glove").mkdir(parents=True, exist_ok=True)
    known = np.array(["bad", "film", "good"])
    stored = {"words": known, "found": np.array([True, True, True]), "vectors": np.full((3, 100), 9, np.float16)}
    clitics = {"clitics": np.array(["n't"]), "clitic_vectors": np.full((1, 100), 9, np.float16)}
    np.savez(folder / "glove" / vocabulary.EXCERPT, allow_pickle=False, **stored, **clitics)


def test_public_words_get_public_vectors_whatever_the_reviews_hold(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The excerpt holds the words that the private reviews hold: a public vocabulary must not look at it."""
    imitation(empty_machine, monkeypatch)
    excerpt(tmp_path / "given")
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "given"))
    assert imdb.glove_embedding("glove", words=8)[4:, 0].tolist() == [1, 2, 3, 4]
    assert imdb.glove_embedding("keras", words=8)[4:, 0].tolist() == [9, 9, 9, 9], "ranks that are declared private"


def test_public_words_need_the_official_vectors(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    excerpt(empty_machine)
    monkeypatch.setattr(vocabulary, "GLOVE", Remote("http://127.0.0.1:9/glove.zip"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(DataUnavailable, match=r"glove\.zip cannot be fetched from .*: go online, or set SORDINO_DATA"):
        imdb.glove_embedding("glove", words=8)


def test_padding_and_cutting_sides() -> None:
    ids, ends = np.array([7, 8, 9, 5]), np.array([3, 4])
    assert vocabulary.cut_windows(ids, ends, 3, "post", "post").tolist() == [[1, 7, 8], [1, 5, 0]]
    assert vocabulary.cut_windows(ids, ends, 3, "pre", "pre").tolist() == [[7, 8, 9], [0, 1, 5]]
    with pytest.raises(InvalidInput, match="pad='left' must be 'pre' or 'post'"):
        vocabulary.cut_windows(ids, ends, 3, "left", "pre")


def test_a_table_of_reviews_keeps_tabs_and_strange_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv.xz"
    path.write_bytes(lzma.compress("0\t1\t5\ta\tb\x85c\n1\t9\t6\td".encode()))
    assert imdb._read_table(path) == (["a\tb\x85c", "d"], [0, 1])
    for bad in (b"plain", lzma.compress(b"0\t1\n"), lzma.compress(b"x\t1\t5\ta")):
        path.write_bytes(bad)
        with pytest.raises(DataUnavailable, match="is not a table of reviews"):
            imdb._read_table(path)


def test_a_loader_batches_the_records() -> None:
    x, y = next(iter(DataLoader(data.load("digits").train_set, batch_size=5)))
    assert (tuple(x.shape), tuple(y.shape)) == ((5, 1, 8, 8), (5,))


def test_a_step_that_read_private_records_is_a_caveat() -> None:
    digits = data.load("digits")
    leaky = data.Preprocessing("divided by the largest training pixel", True, "divide by 16")
    spoilt = replace(digits, preprocessing=(*digits.preprocessing, leaky))
    assert spoilt.caveats == ("divided by the largest training pixel (instead: divide by 16)",)
    assert digits.caveats == ()


def test_records_made_on_the_fly_become_tensors_in_order() -> None:
    class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, ...]]):
        def __len__(self) -> int:
            return 1500

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([index * index]), torch.tensor(index % 2)

    x, y = tensors(Squares())
    assert torch.equal(x[:, 0], torch.arange(1500) ** 2)
    assert torch.equal(y, torch.arange(1500) % 2)
    with pytest.raises(InvalidInput, match="must have a length"):
        tensors(torch.utils.data.Dataset())
