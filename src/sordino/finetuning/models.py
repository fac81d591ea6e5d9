"""Loads the model to fine-tune: from a folder on this machine, or with random weights from a `config.json`.

Nothing is downloaded, and no code in a folder is run.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sordino.errors import InvalidInput, SordinoError
from sordino.finetuning.choice import BYTES, CAUSAL, HALF, TextChoice
from sordino.finetuning.low_precision import store_in_bytes
from sordino.finetuning.tokens import find_padding, has_tokenizer, load_tokenizer

CONFIG = "config.json"
BASE = "base"
"""The folder in a run that holds the model it began with, if its weights were random."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
_NAMES_SHOWN = 4


class FinetuningMissing(SordinoError, ImportError):
    """Fine-tuning needs transformers and peft, which are not installed."""


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: a folder. Its weights are used, unless it has none or only its shape is wanted."""

    folder: Path
    random: bool

    @property
    def name(self) -> str:
        """The model's name in reports: the folder's own name, not its path."""
        return self.folder.name


def find_origin(given: str) -> Origin:
    """Find the folder of a model with weights, or a `config.json` for a model that begins at random."""
    path = Path(given)
    wanted = "give a folder that holds config.json and weights, or a config.json for a model with random weights"
    if not path.exists():
        raise InvalidInput(
            f"model={given!r} is neither a model folder nor a config.json on this machine, and nothing is downloaded: "
            f"{wanted}"
        )
    if path.is_dir():
        _read_config(path / CONFIG, f"model={given} holds no config.json: {wanted}")
        if not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
            raise InvalidInput(
                f"model={given} holds no weights (*.safetensors): give {path / CONFIG} for a model with random ones"
            )
        return Origin(path.resolve(), random=False)
    if path.suffix != ".json":
        raise InvalidInput(f"model={given} is neither a folder nor a config.json: {wanted}")
    _read_config(path, f"model={given} cannot be read: {wanted}")
    return Origin(path.resolve().parent, random=True)


def _read_config(path: Path, missing: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InvalidInput(missing) from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise InvalidInput(f'{path} is not the configuration of a transformers model: it must name its "model_type"')
    return found


def require_packages() -> None:
    """Say which extra is missing, before anything is read."""
    try:
        import peft  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise FinetuningMissing(f"{error.name} is missing: pip install 'sordino[finetuning]'") from None


def load_config(origin: Origin, choice: TextChoice, tokenizer: Any, classes: Sequence[str]) -> Any:
    """Load the model's configuration and make it fit task, classes and tokenizer."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(origin.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # whatever the files of a folder make transformers raise
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(f"{origin.folder / CONFIG} cannot be loaded ({type(error).__name__}: {reason})") from None
    if choice.lora is None and getattr(config, "quantization_config", None):
        raise InvalidInput(f"the weights of {origin.name} are quantised and cannot be trained: give --lora r=8")
    if choice.task != CAUSAL:
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: number for number, name in enumerate(classes)}
        config.problem_type = "single_label_classification"
    if origin.random and not has_tokenizer(origin.folder):
        config.vocab_size = len(tokenizer)  # rows that belong to no byte would only collect noise
    elif config.vocab_size < len(tokenizer):
        raise InvalidInput(
            f"model={origin.name} has {config.vocab_size:,} tokens, its tokenizer {len(tokenizer):,}: "
            "give the tokenizer that belongs to it"
        )
    config.pad_token_id = find_padding(tokenizer)
    for mark in ("bos_token_id", "eos_token_id"):
        if getattr(tokenizer, mark) is not None or origin.random:
            setattr(config, mark, getattr(tokenizer, mark))
    return config


def find_length(config: Any, wanted: int | None, usual: int) -> int:
    """Find how many tokens of a text are read: as requested, or the usual number; never more than the model takes."""
    names = ("max_position_embeddings", "n_positions", "n_ctx")
    limits = (getattr(config, name, None) for name in names)
    most = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    if config.model_type in ("roberta", "xlm-roberta", "camembert") and most is not None:
        most -= 2  # the first two positions belong to padding
    if wanted is None:
        return usual if most is None else min(usual, most)
    if most is not None and wanted > most:
        raise InvalidInput(f"length={wanted} must be <= {most}: the model takes no longer texts")
    return wanted


def load_base(origin: Origin, choice: TextChoice, config: Any, seed: int) -> tuple[nn.Module, list[str]]:
    """Load the model without adapters, in eval mode, and the names of its tensors that the folder does not hold."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    dtype = torch.bfloat16 if choice.dtype == HALF and choice.lora is not None else torch.float32
    kind = AutoModelForCausalLM if choice.task == CAUSAL else AutoModelForSequenceClassification
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            if origin.random:
                return kind.from_config(config, trust_remote_code=False, dtype=dtype).eval(), []
            model, told = kind.from_pretrained(
                origin.folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                dtype=dtype,
            )
        except Exception as error:  # noqa: BLE001  # whatever the files of a folder make transformers raise
            reason = " ".join(str(error).split())[:200]
            raise InvalidInput(
                f"model={origin.name} cannot be built for --task {choice.task} ({type(error).__name__}: {reason})"
            ) from None
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in told.get("mismatched_keys", ())]
    return model.eval(), sorted({*told.get("missing_keys", ()), *mismatched})


def adapt(model: nn.Module, choice: TextChoice, seed: int) -> nn.Module:
    """Add low-rank changes beside frozen weights, or return the model as it is. A new classifier is always trained.

    Trained weights are in float32; frozen ones are kept as the choice says.
    """
    lora = choice.adapter
    if lora is None:
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    kind = TaskType.CAUSAL_LM if choice.task == CAUSAL else TaskType.SEQ_CLS
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            shape = LoraConfig(
                task_type=kind, r=lora.rank, lora_alpha=lora.alpha, target_modules=_find_targets(model, lora.targets)
            )
            adapted: nn.Module = get_peft_model(model, shape)
        except (TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InvalidInput(f"lora={lora} does not fit this model: {reason}") from None
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if choice.dtype == BYTES:
        store_in_bytes(adapted)
    return adapted.eval()


def _find_targets(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Find the requested layers, those that are usual for the architecture, or all linear layers of its body."""
    from peft.utils import constants

    if targets:
        return list(targets)
    usual = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    found = usual.get(getattr(getattr(model, "config", None), "model_type", ""))
    if found:
        return list(found)
    prefix: str = getattr(model, "base_model_prefix", "")  # layers outside it are the head, which has its own rule
    body = getattr(model, prefix) if prefix and hasattr(model, prefix) else model
    inside = f"{prefix}." if body is not model else ""
    return [inside + name for name, module in body.named_modules() if isinstance(module, nn.Linear)]


def save_model(model: nn.Module, tokenizer: Any, folder: Path, base: Path | None = None) -> None:
    """Write a model, or its adapters for the model in `base`, and its tokenizer, as transformers and PEFT read them.

    The folder is complete or missing: a kill leaves at most a folder that is called `.partial`.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    adapters = getattr(model, "peft_config", {})
    for adapter in adapters.values():
        adapter.base_model_name_or_path = None if base is None else str(base)
    with quiet():
        # Under adapters the embedding is frozen: it need not be written again, whatever its size.
        model.save_pretrained(partial, **({"save_embedding_layers": False} if adapters else {}))  # type: ignore[operator]  # a model of transformers
        tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


def name_tensors(names: Sequence[str]) -> str:
    """Write a few names of tensors, and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def open_tokenizer(origin: Origin) -> Any:
    """Open the tokenizer of a model, without messages from transformers."""
    with quiet():
        return load_tokenizer(origin.folder)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers prints about loading, which our own messages say; its settings are restored."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
