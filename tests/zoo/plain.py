"""Known architectures in plain PyTorch, as small as they can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.specimen import Specimen

WORDS = 40


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module | None = None
        if stride > 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + around)


class ResNet(nn.Module):
    """He and others, 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        inner = self.gamma * self.pwconv2(F.gelu(self.pwconv1(inner)))
        return x + inner.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Liu and others, 2022: channels last inside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.GroupNorm(1, 8))
        self.stages = nn.ModuleList([ConvNeXtBlock(8), ConvNeXtBlock(8)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean((-2, -1))))


def double_conv(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GroupNorm(2, outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Ronneberger and others, 2015: what goes down is put beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = double_conv(1, 4), double_conv(4, 8)
        self.bottom = double_conv(8, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.join2, self.join1 = double_conv(16, 8), double_conv(8, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.bottom(F.max_pool2d(two, 2))
        two = self.join2(torch.cat([two, self.up2(low)], 1))
        one = self.join1(torch.cat([one, self.up1(two)], 1))
        return self.head(one)


class M5(nn.Module):
    """Dai and others, 2016: sounds as one long row of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 8, 16, 4), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
        self.third = nn.Sequential(nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.ReLU())
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(self.first(x), 4)
        x = F.max_pool1d(self.second(x), 2)
        return self.fc(self.third(x).mean(-1))


class Tagger(nn.Module):
    """An LSTM that reads both ways and says something about every word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 5)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(words))
        return self.head(hidden)


class SeqToSeq(nn.Module):
    """Sutskever and others, 2014: one GRU reads, another writes."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8)
        self.encoder = nn.GRU(8, 8)
        self.decoder = nn.GRU(8, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        # Time first, as recurrent networks of PyTorch have it.
        _, state = self.encoder(self.source(source.T))
        hidden, _ = self.decoder(self.target(target.T), state)
        return self.head(hidden).transpose(0, 1)


class Translator(nn.Module):
    """`nn.Transformer`, as it is, in either order of its axes."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8)
        self.transformer = nn.Transformer(
            8, 2, 2, 2, dim_feedforward=16, dropout=0.0, batch_first=batch_first
        )
        self.head = nn.Linear(8, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(self.source(source), self.target(target)))


class TiedLanguageModel(nn.Module):
    """Press and Wolf, 2016: the weights that read words also write them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.blocks(self.embed(words), mask, is_causal=True))


class WideAndDeep(nn.Module):
    """Cheng and others, 2016: numbers and categories, each as an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 1)
        self.embed = nn.Embedding(WORDS, 4)
        self.deep = nn.Sequential(nn.Linear(4 + 6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        deep = self.deep(torch.cat([numbers, self.embed(category)], 1))
        return self.wide(numbers) + self.head(deep)


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 8), nn.GELU(), nn.Linear(8, patches))
        self.channels = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Tolstikhin and others, 2021."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, 8), MixerBlock(16, 8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


class DenseLayer(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inside), nn.Conv2d(inside, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(torch.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    """Huang and others, 2016."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.dense = nn.Sequential(*(DenseLayer(8 + 4 * number, 4) for number in range(3)))
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dense(self.stem(x)).mean((-2, -1)))


class InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 3 * width
        self.conv = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True), nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class MobileNet(nn.Module):
    """Sandler and others, 2018."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.features = nn.Sequential(first, InvertedResidual(8), InvertedResidual(8))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class VAE(nn.Module):
    """Kingma and Welling, 2013: draws between encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 12), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


class PointNet(nn.Module):
    """Qi and others, 2016: a set of points, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(8, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.second(self.first(points.transpose(1, 2))).amax(-1))


class Siamese(nn.Module):
    """Bromley and others, 1993: one encoder looks at both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.out = nn.Linear(8, 1)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.out(self.head((self.encoder(one) - self.encoder(other)).abs()))


class DeepSets(nn.Module):
    """Zaheer and others, 2017: every element alike, so that nothing tells the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.out = nn.Linear(8, 2)

    def forward(self, elements: Tensor) -> Tensor:
        return self.out(self.each(elements))


class VideoNet(nn.Module):
    """Tran and others, 2014: convolutions over space and time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(8, 5)

    def forward(self, frames: Tensor) -> Tensor:
        return self.fc(self.second(self.first(frames)).mean((-3, -2, -1)))


class SetTransformer(nn.Module):
    """Attention that its owner forgot to tell which axis holds the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 2)

    def forward(self, elements: Tensor) -> Tensor:
        return self.head(self.block(self.embed(elements)).mean(1))


class WaveNetBlock(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = dilation
        self.filter = nn.Conv1d(width, width, 2, dilation=dilation)
        self.gate = nn.Conv1d(width, width, 2, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        padded = F.pad(x, (self.pad, 0))
        out = self.mix(torch.tanh(self.filter(padded)) * torch.sigmoid(self.gate(padded)))
        return x + out, out


class WaveNet(nn.Module):
    """van den Oord and others, 2016: every block gives a residual and a part of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 1)
        self.blocks = nn.ModuleList([WaveNetBlock(8, 1), WaveNetBlock(8, 2), WaveNetBlock(8, 4)])
        self.head = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = torch.zeros_like(x)
        for block in self.blocks:
            x, skip = block(x)
            skips = skips + skip
        return self.head(torch.relu(skips + x))


class NeuralField(nn.Module):
    """Mildenhall and others, 2020: coordinates in, colours out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )

    def forward(self, where: Tensor) -> Tensor:
        rates = math.pi * 2.0 ** torch.arange(2)
        angles = (where[..., None] * rates).flatten(-2)
        return self.layers(torch.cat([angles.sin(), angles.cos()], -1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def words(*shape: int) -> Tensor:
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(1))


def _plain(
    name: str, make: Callable[[], nn.Module], *example: Callable[[], Any], axes: str | None = None
) -> Specimen:
    def batch() -> Any:
        parts = tuple(part() for part in example)
        return parts[0] if len(parts) == 1 else parts

    return Specimen(name, make, batch, axes)


QUICK = (
    _plain("ResNet", ResNet, partial(numbers, 4, 3, 16, 16)),
    _plain("U-Net", UNet, partial(numbers, 4, 1, 16, 16)),
    _plain("LSTM, both ways", Tagger, partial(words, 4, 7)),
    _plain(
        "nn.Transformer, time first",
        partial(Translator, batch_first=False),
        partial(words, 9, 4),
        partial(words, 7, 4),
    ),
    _plain("language model with tied weights", TiedLanguageModel, partial(words, 4, 9)),
)
"""A few that tell most, for every day."""

PLAIN = (
    *QUICK,
    _plain(
        "nn.Transformer, samples first",
        partial(Translator, batch_first=True),
        partial(words, 4, 9),
        partial(words, 4, 7),
    ),
    _plain("ConvNeXt", ConvNeXt, partial(numbers, 4, 3, 16, 16)),
    _plain("M5 (Conv1d)", M5, partial(numbers, 4, 1, 256)),
    _plain("WaveNet", WaveNet, partial(numbers, 4, 1, 32)),
    _plain("GRU sequence to sequence", SeqToSeq, partial(words, 4, 9), partial(words, 4, 7)),
    _plain("Wide & Deep", WideAndDeep, partial(numbers, 4, 6), partial(words, 4)),
    _plain("MLP-Mixer", Mixer, partial(numbers, 4, 3, 16, 16)),
    _plain("DenseNet", DenseNet, partial(numbers, 4, 3, 8, 8)),
    _plain("MobileNetV2", MobileNet, partial(numbers, 4, 3, 16, 16)),
    _plain("variational autoencoder", VAE, partial(numbers, 4, 16)),
    _plain("PointNet", PointNet, partial(numbers, 4, 10, 3)),
    _plain("neural field", NeuralField, partial(numbers, 4, 3)),
    _plain("Siamese network", Siamese, partial(numbers, 4, 6), partial(numbers, 4, 6)),
    _plain("C3D (video)", VideoNet, partial(numbers, 2, 3, 4, 8, 8)),
    _plain("encoder layer, batch_first forgotten", SetTransformer, partial(numbers, 4, 5, 3)),
    _plain("Deep Sets, undeclared", DeepSets, partial(numbers, 4, 5, 3)),
    _plain("Deep Sets, declared BTC", DeepSets, partial(numbers, 4, 5, 3), axes="BTC"),
)
