"""Networks for token ids of shape [batch, length], id 0 being the padding: IMDb reviews and names by language."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.lab.networks.activations import Activation, build_activation


class ImdbBiLSTM(nn.Module):
    """Embedding, dense 32, bidirectional LSTM 32, mean over time, dense 16, output (DPIS and DPSUR on IMDb)."""

    def __init__(self, embedding: nn.Embedding, activation: Activation, classes: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.project = nn.Sequential(nn.Linear(embedding.embedding_dim, 32), build_activation(activation))
        self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(64, 16), build_activation(activation), nn.Linear(16, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.project(self.embedding(tokens)))
        logits: Tensor = self.head(states.mean(dim=1))
        return logits


class JlBiLSTM(nn.Module):
    """Embedding, bidirectional LSTM 64, last state of both directions, dense 64, output (DP-SGD-JL on IMDb)."""

    def __init__(self, vocabulary: int, activation: Activation, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(128, 64), build_activation(activation), nn.Linear(64, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        last = torch.cat([states[:, -1, :64], states[:, 0, 64:]], dim=1)
        logits: Tensor = self.head(last)
        return logits


class NamesLSTM(nn.Module):
    """Bytes embedded in 64 dimensions, LSTM 128, last step, output (Dynamic DP-SGD's NAME task)."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.output = nn.Linear(128, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.output(states[:, -1])
        return logits


class EmbeddingMLP(nn.Module):
    """Mean of the word vectors, one hidden layer, output."""

    def __init__(self, vocabulary: int, dimension: int, hidden: int, activation: Activation, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dimension)
        self.head = nn.Sequential(
            nn.Linear(dimension, hidden), build_activation(activation), nn.Linear(hidden, classes)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens).mean(dim=1))
        return logits


class Transformer(nn.Module):
    """A pre-norm encoder with fixed sine positions (Vaswani et al. 2017, section 3.5), mean over time, output."""

    positions: Tensor

    def __init__(self, vocabulary: int, length: int, dimension: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dimension)
        self.register_buffer("positions", sine_positions(length, dimension), persistent=False)
        layer = nn.TransformerEncoderLayer(
            dimension, heads, dim_feedforward=4 * dimension, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(dimension), enable_nested_tensor=False)
        self.output = nn.Linear(dimension, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        length, longest = tokens.shape[1], self.positions.shape[0]
        if length > longest:
            raise InvalidInput(
                f"length={length} must be <= {longest}: cut the texts or build transformer(length={length})"
            )
        states = self.encoder(self.embedding(tokens) + self.positions[:length])
        logits: Tensor = self.output(states.mean(dim=1))
        return logits


def imdb_bilstm(
    embedding: Tensor | None = None, frozen: bool = True, activation: Activation = "tanh", classes: int = 2
) -> ImdbBiLSTM:
    """The IMDb network of DPIS and DPSUR: 21,202 parameters besides the embedding.

    Without `embedding`, 20,000 x 100 random vectors are trained as DPSUR does (2,021,202 parameters in all). With one
    row per token id, such as `sordino.lab.data.imdb.glove_embedding()`, those vectors are the start and, if `frozen`,
    stay as in DPIS.
    """
    if embedding is None:
        return ImdbBiLSTM(nn.Embedding(20_000, 100), activation, classes)
    return ImdbBiLSTM(nn.Embedding.from_pretrained(embedding.float(), freeze=frozen), activation, classes)


def jl_bilstm(
    vocabulary: int = 8185, activation: Activation = "relu", single_bias: bool = True, classes: int = 2
) -> JlBiLSTM:
    """The IMDb network of DP-SGD-JL; 598,274 trained parameters.

    Torch gives an LSTM two biases that only ever act as their sum; Keras has one. `single_bias` keeps the second at
    zero, untrained, which is the paper's network and a smaller gradient norm; otherwise 598,786 are trained.
    """
    model = JlBiLSTM(vocabulary, activation, classes)
    if single_bias:
        for name, bias in model.lstm.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(bias).requires_grad_(False)
    return model


def names_lstm(vocabulary: int = 259, classes: int = 18) -> NamesLSTM:
    """The character LSTM for names by language; 118,226 parameters."""
    return NamesLSTM(vocabulary, classes)


def imdb_mlp(activation: Activation = "relu", classes: int = 2) -> EmbeddingMLP:
    """The IMDb network of Dynamic DP-SGD (after Bu et al. 2020): 10,000 words in 16 dimensions; 160,306 parameters."""
    return EmbeddingMLP(10_000, 16, 16, activation, classes)


def embedding_mlp(activation: Activation = "relu", classes: int = 2) -> EmbeddingMLP:
    """20,000 words in 100 dimensions and 64 hidden units: a large sparse gradient; 2,006,594 parameters."""
    return EmbeddingMLP(20_000, 100, 64, activation, classes)


def transformer(
    vocabulary: int = 10_000, length: int = 64, dimension: int = 128, heads: int = 4, layers: int = 4, classes: int = 2
) -> Transformer:
    """A small encoder classifier for texts of at most `length` tokens; 2,073,602 parameters by default."""
    return Transformer(vocabulary, length, dimension, heads, layers, classes)


def sine_positions(length: int, dimension: int) -> Tensor:
    """positions[t, 2i] = sin(t / 10000^(2i/d)), positions[t, 2i+1] the cosine."""
    angles = torch.arange(length)[:, None] * torch.exp(
        torch.arange(0, dimension, 2) * (-math.log(10_000.0) / dimension)
    )
    return torch.stack([angles.sin(), angles.cos()], dim=2).reshape(length, dimension)
