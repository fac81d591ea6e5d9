"""Hugging Face models from configurations, without weights, in full and with LoRA: models that nobody here wrote.

Batches are padded: every example has a length of its own, a mask says which tokens are real, and padding has no loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

IGNORED = -100
LENGTH, WORDS = 128, 8_192
Batch = tuple[Tensor, ...]


def _library() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def bert() -> nn.Module:
    """BERT-mini: 4 layers, 256 wide, two classes; 11M parameters, most of them the vocabulary's."""
    library = _library()
    config = library.BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    model: nn.Module = library.BertForSequenceClassification(config)
    return model.train()


def gpt2() -> nn.Module:
    """A GPT-2 of 2 layers, 256 wide, whose head is its embedding."""
    library = _library()
    config = library.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=256, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = library.GPT2LMHeadModel(config)
    return model.train()


def llama() -> nn.Module:
    """A Llama of 2 layers, 256 wide, with grouped queries."""
    library = _library()
    config = library.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: nn.Module = library.LlamaForCausalLM(config)
    return model.train()


def t5() -> nn.Module:
    """A T5 of 2 + 2 layers with the shapes of T5-small halved."""
    library = _library()
    config = library.T5Config(
        vocab_size=WORDS, d_model=256, d_kv=64, d_ff=1024, num_layers=2, num_decoder_layers=2, num_heads=4
    )
    config.use_cache = False
    model: nn.Module = library.T5ForConditionalGeneration(config)
    return model.train()


def vit() -> nn.Module:
    """ViT-tiny (12 layers, 192 wide) on 32 x 32 pixels in patches of 4."""
    library = _library()
    config = library.ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=10,
    )
    model: nn.Module = library.ViTForImageClassification(config)
    return model.train()


def convnext() -> nn.Module:
    """A small ConvNeXt on 32 x 32 pixels: 7 x 7 depthwise convolutions, LayerNorm, layer scale."""
    library = _library()
    config = library.ConvNextConfig(
        image_size=32, patch_size=2, hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2], num_labels=10
    )
    model: nn.Module = library.ConvNextForImageClassification(config)
    return model.train()


def with_lora(build: Callable[[], nn.Module], targets: list[str], head: str = "") -> Callable[[], nn.Module]:
    """The same model frozen, with adapters of rank 8 on `targets`, and its head trained along if one is named."""

    def adapted() -> nn.Module:
        import peft

        config = peft.LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.0, target_modules=targets, modules_to_save=[head] if head else None
        )
        model: nn.Module = peft.get_peft_model(build(), config)
        return model.train()

    return adapted


def padded(words: int, length: int = LENGTH) -> Callable[[int], Batch]:
    """Tokens, their mask, and one of two classes."""

    def draw(size: int) -> Batch:
        mask = _mask(size, length)
        return torch.randint(1, words, (size, length)) * mask, mask, torch.randint(0, 2, (size,))

    return draw


def continued(words: int, length: int = LENGTH) -> Callable[[int], Batch]:
    """Tokens, their mask, and the token that follows each of them."""

    def draw(size: int) -> Batch:
        mask, text = _mask(size, length), torch.randint(1, words, (size, length + 1))
        return text[:, :-1] * mask, mask, text[:, 1:].masked_fill(mask == 0, IGNORED)

    return draw


def translated(words: int, length: int = LENGTH) -> Callable[[int], Batch]:
    """Tokens and their mask, what the decoder sees of a text half as long, and the token that follows each of it."""

    def draw(size: int) -> Batch:
        tokens, mask, _ = padded(words, length)(size)
        seen, _, following = continued(words, length // 2)(size)
        return tokens, mask, seen, following

    return draw


def _mask(size: int, length: int) -> Tensor:
    """Texts of a quarter of `length` to all of it."""
    lengths = torch.randint(length // 4, length + 1, (size, 1))
    return (torch.arange(length) < lengths).long()


def read(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of a model that reads one text."""
    logits: Tensor = model(batch[0], attention_mask=batch[1]).logits
    return logits


def read_placed(model: nn.Module, batch: Batch) -> Tensor:
    """The same with every example's positions spelt out: Opacus' hooks want the batch in every input of a layer."""
    places = torch.arange(batch[0].shape[1]).expand(batch[0].shape)
    logits: Tensor = model(batch[0], attention_mask=batch[1], position_ids=places).logits
    return logits


def translate(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of a model that reads one text and continues another."""
    logits: Tensor = model(batch[0], attention_mask=batch[1], decoder_input_ids=batch[2]).logits
    return logits


def see(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of a model of images."""
    logits: Tensor = model(batch[0]).logits
    return logits


def score_tokens(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross entropy of each text's own tokens."""
    wanted = batch[-1]
    each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=IGNORED)
    return each.view(wanted.shape).sum(1) / (wanted != IGNORED).sum(1)
