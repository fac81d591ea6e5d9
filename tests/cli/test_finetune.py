"""`sordino finetune`, `generate` and `resume` on texts: a newcomer's path on tiny models, and what is refused."""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from sordino.accounting import Ledger
from sordino.accounting.pricing import epsilon
from sordino.cli import app

pytest.importorskip("peft")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "finetune"
REVIEWS = EXAMPLES / "reviews.csv"
BERT, GPT = (EXAMPLES / name / "config.json" for name in ("tiny-bert", "tiny-gpt2"))
STEPS = 4
QUICK = ("--steps", STEPS, "--length", 24, "--json")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def outcome(result: Result) -> dict:
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout)


def classify(run: Path, *more: object) -> list[object]:
    texts = ["--data", REVIEWS, "--text", "review", "--target", "mood"]
    return ["finetune", "--model", BERT, *texts, "--epsilon", 8, *QUICK, "--run", run, *more]


def write(run: Path, *more: object) -> list[object]:
    texts = ["--data", REVIEWS, "--text", "review", "--task", "causal-lm"]
    return ["finetune", "--model", GPT, *texts, "--epsilon", 8, *QUICK, "--run", run, *more]


@pytest.fixture(scope="module")
def offline() -> Iterator[None]:
    """Whoever opens a connection fails."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection was opened: {arguments}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory, offline: None) -> tuple[Path, Result]:
    run = tmp_path_factory.mktemp("classify") / "run"
    return run, call(*classify(run))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, offline: None) -> tuple[Path, Result]:
    run = tmp_path_factory.mktemp("write") / "run"
    return run, call(*write(run, "--lora", "r=2", "--unit", "guest"))


def test_a_classifier_from_a_configuration(classified: tuple[Path, Result]) -> None:
    run, result = classified
    said = outcome(result)
    assert said["status"] == "finished"
    assert 7 < said["epsilon"] <= 8
    assert 0 <= said["held_out_accuracy"] <= 1
    assert "the weights of tiny-bert are random" in result.stderr
    tables = tomllib.loads((run / "config.toml").read_text())
    plain = {"task": "classify", "text": "review", "length": 24, "dtype": "float32", "chat": False}
    assert tables["finetuning"] == {**plain, "random": True}
    assert tables["schema"]["classes"] == ["content", "cross"], "released, for nobody named them"
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert len(ledger) == 1 + STEPS, "the names of the classes, and the steps"
        assert epsilon(ledger.events(), said["delta"]) == pytest.approx(said["epsilon"])


def test_what_was_trained_is_a_model_that_transformers_reads(classified: tuple[Path, Result]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from sordino.finetuning.classifying import predict_probabilities
    from sordino.finetuning.tuned import load_tuned

    run, _ = classified
    model = AutoModelForSequenceClassification.from_pretrained(run / "model", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model", local_files_only=True)
    assert model.config.id2label == {0: "content", 1: "cross"}
    texts = ["the soup was cold", "the bread was fresh and the music a joy", ""]
    ours = predict_probabilities(load_tuned(run), texts)
    for text, row in zip(texts, ours, strict=True):
        ids = torch.tensor([tokenizer(text, truncation=True, max_length=24)["input_ids"]])
        with torch.no_grad():
            assert torch.allclose(model(input_ids=ids).logits.softmax(1)[0], row, atol=1e-5), "padding changes nothing"


def test_every_weight_of_a_random_model_moves_and_the_base_is_kept(classified: tuple[Path, Result]) -> None:
    from safetensors.torch import load_file

    run, _ = classified
    before, after = (load_file(run / name / "model.safetensors") for name in ("base", "model"))
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_new_texts_are_classified_and_the_file_is_stamped(classified: tuple[Path, Result], tmp_path: Path) -> None:
    run, result = classified
    new, out = make(tmp_path, "new.jsonl", '{"id": 7, "review": "cold soup"}\n{"id": 8}\n'), tmp_path / "out.csv"
    said = outcome(call("predict", run, "--data", new, "--keep", "id", "--out", out, "--json"))
    assert said["records"] == 2
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["7", "8"]
    for row in rows:
        chances = {name: float(row[f"probability of {name}"]) for name in ("content", "cross")}
        assert sum(chances.values()) == pytest.approx(1)
        assert row["predicted"] == max(chances, key=lambda name: chances[name])
    stamp = json.loads((tmp_path / "out.csv.guarantee.json").read_text())
    assert stamp["guarantee"]["epsilon"] == pytest.approx(outcome(result)["epsilon"])
    missing = call("predict", run, "--data", make(tmp_path, "b.csv", "letter\nhello\n"), "--out", tmp_path / "b2.csv")
    assert missing.exit_code == 2
    assert "has no column 'review'" in missing.stderr


def test_a_writer_with_adapters_protects_whole_owners(written: tuple[Path, Result]) -> None:
    run, result = written
    said = outcome(result)
    assert said["unit"] == "user"
    assert said["held_out_accuracy"] is None
    assert said["held_out_loss"] > 1
    tables = tomllib.loads((run / "config.toml").read_text())
    guests = {line.split(",")[0] for line in REVIEWS.read_text().splitlines()[1:]}
    assert tables["data"]["records"] < len(guests), "owners are counted, a fifth of them is held out"
    assert tables["finetuning"]["lora"] == "r=2,alpha=4"


def test_adapters_alone_move_and_peft_reads_them(written: tuple[Path, Result]) -> None:
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file

    from sordino.finetuning.tuned import load_tuned

    run, _ = written
    tuned = load_tuned(run)
    base = load_file(run / "base" / "model.safetensors")
    inner = {name.replace(".base_layer", ""): value for name, value in tuned.model.get_base_model().named_parameters()}
    frozen = {name: value for name, value in inner.items() if "lora" not in name}
    assert all(torch.equal(value, base[name]) for name, value in frozen.items())
    assert all(bool(value.any()) for name, value in inner.items() if "lora_B" in name), "they begin at zero"
    again = AutoPeftModelForCausalLM.from_pretrained(run / "model", local_files_only=True).eval()
    ids = torch.tensor([[1, 50, 60, 70]])
    with torch.no_grad():
        assert torch.allclose(again(input_ids=ids).logits, tuned.model(input_ids=ids).logits, atol=1e-5)
        merged = again.merge_and_unload()
        assert torch.allclose(merged(input_ids=ids).logits, tuned.model(input_ids=ids).logits, atol=1e-4)


def test_synthetic_texts_are_stamped_and_repeatable(written: tuple[Path, Result], tmp_path: Path) -> None:
    run, result = written
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    outs = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for out, seed in zip(outs, (1, 1, 2), strict=True):
        asked = ("--records", 35, "--prompt", "the ", "--length", 5, "--seed", seed, "--json")
        said = outcome(call("generate", run, "--out", out, *asked))
        assert said["guarantee"]["epsilon"] == pytest.approx(outcome(result)["epsilon"])
    first, again, other = ([json.loads(line)["text"] for line in out.read_text().splitlines()] for out in outs)
    assert len(first) == 35
    assert all(text.startswith("the ") for text in first)
    assert first == again != other
    assert len(set(first)) > 30, "the second batch is not the first once more"
    stamp = json.loads(Path(f"{outs[0]}.guarantee.json").read_text())
    assert (stamp["records"], stamp["prompt"], stamp["sampling"]["seed"]) == (35, "the ", 1)
    assert stamp["guarantee"]["unit"] == "user"
    assert "protect" in stamp["in_words"] or "privacy" in stamp["in_words"]
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")), "nothing in the run changes"
    assert "trained for causal-lm" in call("predict", run, "--data", REVIEWS).stderr
    refused = call("generate", run, "--records", 1, "--out", outs[0])
    assert refused.exit_code == 2
    assert "exists already" in refused.stderr


def test_a_classifier_writes_nothing_and_bad_settings_are_named(classified, written, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    for arguments, words in (
        ((classified[0],), "was trained for classify"),
        ((tmp_path,), "is not a run of `sordino finetune`"),
        ((written[0], "--temperature", 0), "temperature=0 must be in"),
        ((written[0], "--top-p", 2), "top-p=2 must be in"),
        ((written[0], "--records", 0), "records=0 must be >= 1"),
        ((written[0], "--prompt", "x" * 99), "the prompt has 99 tokens"),
    ):
        result = call("generate", *arguments, "--out", out)
        assert (result.exit_code, len(result.stderr.strip().splitlines()[-1:])) == (2, 1)
        assert words in result.stderr, result.stderr
    assert not list(tmp_path.iterdir())


def test_a_report_of_texts(classified: tuple[Path, Result]) -> None:
    run, _ = classified
    result = call("report", run)
    assert result.exit_code == 0, result.stderr
    page = (run / "report.html").read_text()
    assert "tiny-bert" in page
    assert str(EXAMPLES) not in page, "where files lie is nobody else's business"
    assert "sordino train --config" not in page, "that would not make this run again"


def killed(arguments: list[object], events: int) -> None:
    """Run the command in a forked process that dies, as by SIGKILL, when the ledger holds so many events."""
    child = os.fork()
    if not child:
        charge = Ledger.charge

        def die(self: Ledger, *given: object, **named: object) -> object:
            receipt = charge(self, *given, **named)  # type: ignore[arg-type]
            if len(self) >= events:
                os._exit(9)
            return receipt

        Ledger.charge = die  # type: ignore[method-assign]  # in this process alone
        try:
            call(*arguments)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("events", [1, 3], ids=["while classes are named", "in training"])
def test_a_killed_run_is_gone_on_with(tmp_path: Path, events: int) -> None:
    run = tmp_path / "run"
    killed(classify(run, "--save-every", 1), events)
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert len(ledger) >= events
    said = outcome(call("resume", run, "--json"))
    assert said["epsilon"] <= 8
    assert said["steps"] >= STEPS - 1
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert epsilon(ledger.events(), said["delta"]) <= 8
    assert (run / "model" / "model.safetensors").is_file()


def test_a_finished_run_is_resumed_to_the_same_end(written: tuple[Path, Result]) -> None:
    run, result = written
    said, before = outcome(call("resume", run, "--json")), outcome(result)
    assert {k: said[k] for k in ("epsilon", "steps", "held_out_loss")} == pytest.approx(
        {k: before[k] for k in ("epsilon", "steps", "held_out_loss")}
    )


# -- conversations, and frozen weights of few bits --------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model with weights, whose tokenizer has a chat template."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(path)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape)).save_pretrained(path)
    return path


def talk(number: int) -> list[dict[str, str]]:
    question = {"role": "user", "content": f"table {number}?"}
    return [question, {"role": "assistant", "content": ("yes", "no")[number % 2]}] * (1 + number % 2)


def converse(run: Path, model: Path, data: Path, *more: object) -> Result:
    asked = ("--text", "messages", "--task", "causal-lm", "--epsilon", 8, "--steps", 2, "--length", 40, "--json")
    return call("finetune", "--model", model, "--data", data, *asked, "--run", run, *more)


@pytest.mark.parametrize(
    ("ending", "dtype"),
    [("jsonl", "bfloat16"), pytest.param("parquet", "int8", marks=pytest.mark.slow)],
)
def test_conversations_and_a_frozen_base_of_few_bits(tmp_path: Path, chatty: Path, ending: str, dtype: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sordino.finetuning.tuned import load_tuned

    rows = [{"messages": talk(number)} for number in range(60)]
    data = tmp_path / f"chats.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    else:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    said = outcome(converse(run, chatty, data, "--dtype", dtype))
    assert said["epsilon"] <= 8
    tables = tomllib.loads((run / "config.toml").read_text())
    assert (tables["finetuning"]["chat"], tables["finetuning"]["dtype"]) == (True, dtype)
    halved = [line for line in said["assumptions"] if "half precision" in line]
    assert bool(halved) == (dtype == "bfloat16")
    tuned = load_tuned(run)
    kinds = {name: tensor.dtype for name, tensor in tuned.model.state_dict().items()}
    trained = {name for name in kinds if "lora_" in name}
    assert trained
    assert {kinds[name] for name in trained} == {torch.float32}
    frozen = {kinds[name] for name in kinds if "_proj" in name and name.endswith("weight") and name not in trained}
    assert frozen == {torch.bfloat16 if dtype == "bfloat16" else torch.int8}
    again = outcome(call("resume", run, "--json"))
    assert again["held_out_loss"] == pytest.approx(said["held_out_loss"])
    out = tmp_path / "synthetic.jsonl"
    outcome(call("generate", run, "--records", 2, "--out", out, "--json"))
    assert len(out.read_text().splitlines()) == 2


def test_conversations_that_cannot_be_read_are_named_by_number_alone(tmp_path: Path, chatty: Path) -> None:
    run, good = tmp_path / "run", json.dumps({"messages": talk(1)})
    for bad, words in (
        ('{"messages": [{"role": "user", "content": ["secret"]}]}', "record 2: column 'messages' must hold a conv"),
        ('{"messages": "secret"}', "record 2: column 'messages' must hold a conv"),
        ('{"messages": []}', "record 2: column 'messages' must hold a conv"),
    ):
        result = converse(run, chatty, make(tmp_path, "chats.jsonl", f"{good}\n{bad}\n"))
        assert result.exit_code == 2, result.stdout
        assert words in result.stderr
        assert "secret" not in result.stderr
    untold = converse(run, GPT, make(tmp_path, "chats.jsonl", good))
    assert "has no chat template" in untold.stderr
    whole = converse(run, GPT, make(tmp_path, "texts.jsonl", '{"messages": "x"}\n' * 40), "--dtype", "int8", "--full")
    assert "dtype=int8 is for frozen weights" in whole.stderr
    assert not run.exists()


def test_a_first_step_without_noise_ends_the_run(tmp_path: Path) -> None:
    """As if something had emptied gradients behind our back: what is not trained is found after one step."""
    from sordino.cli import launch, text_session
    from sordino.cli.choosing_texts import choose
    from sordino.cli.finetune import FinetuneFlags
    from sordino.errors import UnsupportedModel

    flags = FinetuneFlags(
        model=str(GPT), data=REVIEWS, text="review", task="causal-lm", epsilon=8.0, steps=STEPS, length=24, lora="r=2"
    )
    session = text_session.begin(choose(flags), tmp_path / "run")
    session.private.bench.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad())
    with session.private, pytest.raises(UnsupportedModel, match=r"after the first step .*lora_.* no noise"):
        launch.finish(session, as_json=True)


# -- refused before anything is spent ---------------------------------------------------------------------------------


def make(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


Change = Callable[[Path], dict[str, object]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {"--model": "bert-base-uncased"}, "neither a model folder nor a config.json"),
        (lambda t: {"--model": t}, "holds no config.json"),
        (lambda t: {"--model": BERT.parent}, "holds no weights"),
        (lambda t: {"--model": make(t, "config.json", "{}")}, 'must name its "model_type"'),
        (lambda t: {"--model": make(t, "config.json", '{"model_type": "nonsense"}')}, "cannot be loaded"),
        (lambda t: {"--model": REVIEWS}, "neither a folder nor a config.json"),
        (lambda t: {"--data": t / "none.csv"}, "does not exist"),
        (lambda t: {"--data": make(t, "a.docx", "x")}, "must be a .csv"),
        (lambda t: {"--data": make(t, "a.parquet", "x")}, "no Parquet, or damaged"),
        (lambda t: {"--data": make(t, "a.jsonl", '{"review": "x"}\n[1]\n')}, "line 2 is not a JSON object"),
        (lambda t: {"--data": make(t, "a.jsonl", '{"review": ["x"], "mood": "y"}')}, "holds a list"),
        (lambda t: {"--data": make(t, "a.csv", "review,mood\n")}, "has 0 records"),
        (lambda t: {"--data": make(t, "a.csv", "review,mood\n" + " ,a\n,b\n" * 9)}, "holds no text"),
        (
            lambda t: {"--data": make(t, "a.csv", "review,mood\n" + "hi,secret\n" * 9)},
            "it takes 2",
        ),
        (lambda t: {"--text": "body"}, "reviews has no column 'body': it has guest, review, mood"),
        (lambda t: {"--target": "body"}, "has no column 'body'"),
        (lambda t: {"--target": "review"}, "a column of its own"),
        (lambda t: {"--target": None}, "give --target COLUMN to classify, or --task causal-lm"),
        (lambda t: {"--task": "translate"}, "task='translate' must be one of"),
        (lambda t: {"--task": "causal-lm"}, "are for classifying"),
        (lambda t: {"--classes": "content"}, "must be 2 to"),
        (lambda t: {"--classes": "a,b"}, "must be one of the classes a, b"),
        (lambda t: {"--unit": "guest"}, "--unit needs --classes"),
        (lambda t: {"--per-unit": 3}, "belongs to --unit"),
        (lambda t: {"--lora": "rank 8"}, "must look like r=8"),
        (lambda t: {"--lora": "r=0"}, "r=0 must be in"),
        (lambda t: {"--lora": "r=2,targets=nowhere"}, "does not fit this model"),
        (lambda t: {"--length": 1000}, "length=1000 must be <= 96"),
        (lambda t: {"--length": 1}, "length=1 must be in"),
        (lambda t: {"--held-out": 1}, "held-out=1.0 must be in"),
        (lambda t: {"--epsilon": None}, "give --epsilon"),
        (lambda t: {"--epsilon": 0.1}, "too few to release the names of the classes"),
        (lambda t: {"--optimizer": "lion"}, "optimizer='lion' must be one of"),
        (lambda t: {"--epochs": 2}, "are both given"),
    ],
)
def test_bad_input_is_one_line_and_spends_nothing(tmp_path: Path, change: Change, words: str) -> None:
    given: dict[str, object] = {
        "--model": BERT,
        "--data": REVIEWS,
        "--text": "review",
        "--target": "mood",
        "--epsilon": 8,
        "--steps": STEPS,
        "--run": tmp_path / "run",
        **change(tmp_path),
    }
    result = call("finetune", *(part for item in given.items() if item[1] is not None for part in item))
    assert result.exit_code == 2, (result.stdout, result.exception)
    last = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(last) == 1, result.stderr
    assert words in last[0]
    assert "secret" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_both_lora_and_full_are_refused(tmp_path: Path) -> None:
    result = call(*classify(tmp_path / "run", "--lora", "8", "--full"))
    assert result.exit_code == 2
    assert "are both given" in result.stderr


def test_a_run_whose_texts_changed_is_not_gone_on_with(written: tuple[Path, Result], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(written[0], run)
    fewer = make(tmp_path, "reviews.csv", "\n".join(REVIEWS.read_text().splitlines()[:300]) + "\n")
    configured = (run / "config.toml").read_text().replace(str(REVIEWS), str(fewer))
    (run / "config.toml").write_text(configured)
    result = call("resume", run)
    assert result.exit_code == 2
    assert "as when its run began" in result.stderr


# -- a model from a folder --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained encoder, as far as anybody can tell, with a tokenizer of words; its head is for another task."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DistilBertConfig, DistilBertForMaskedLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("models") / "distil"
    words = ["[PAD]", "[UNK]", "the", "was", "and", "cold", "fresh", "soup", "bread", ",", "."]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path)
    shape = {"dim": 16, "n_heads": 2, "n_layers": 1, "hidden_dim": 16, "max_position_embeddings": 32}
    DistilBertForMaskedLM(DistilBertConfig(vocab_size=len(words), **shape)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    run = tmp_path_factory.mktemp("adapted") / "run"
    return run, call(*classify(run, "--classes", "content,cross", "--model", folder, "--method", "dpsgd"))


def test_a_model_with_weights_is_adapted_by_default(adapted: tuple[Path, Result], folder: Path) -> None:
    run, result = adapted
    outcome(result)
    assert "does not hold classifier.bias, classifier.weight, pre_classifier.bias" in result.stderr
    tables = tomllib.loads((run / "config.toml").read_text())
    assert tables["finetuning"] == {
        "task": "classify",
        "text": "review",
        "length": 24,
        "lora": "r=8,alpha=16",
        "random": False,
        "dtype": "float32",
        "chat": False,
    }
    assert not (run / "base").exists(), "the folder is where it was"
    assert json.loads((run / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert len(ledger) == STEPS, "the classes were given: nothing is released about them"
    assert any("model and tokenizer were public before" in line for line in outcome(result)["assumptions"])


def test_a_run_is_of_no_use_without_its_model(adapted: tuple[Path, Result], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapted[0], run)
    path = tomllib.loads((run / "config.toml").read_text())["model"]["path"]
    (run / "config.toml").write_text((run / "config.toml").read_text().replace(path, "/nowhere"))
    result = call("resume", run)
    assert result.exit_code == 2
    assert "which is not there any more: restore it" in result.stderr
