"""Hosts: the small networks that presets train and grow.

A host is an ordinary `nn.Module` that names the submodules whose output may be augmented. One
file per kind; importing the package registers them. To add one: docs/how-to/add-a-host.md.
"""

from __future__ import annotations

from esper.kasmina.hosts.cnn import CnnConfig, CnnHost, ResidualConfig, ResidualHost, doubling
from esper.kasmina.hosts.mlp import MlpConfig, MlpHost
from esper.kasmina.hosts.registry import (
    HOSTS,
    BuiltInSeed,
    GrownConfig,
    build_host,
    host_slots,
    pick_slots,
    register_host,
)
from esper.kasmina.hosts.resnet import ResnetConfig, ResnetHost
from esper.kasmina.hosts.tcn import TcnConfig, TcnHost
from esper.kasmina.hosts.transformer import TransformerConfig, TransformerHost
from esper.kasmina.hosts.vit import VitConfig, VitHost

__all__ = [
    "HOSTS",
    "BuiltInSeed",
    "CnnConfig",
    "CnnHost",
    "GrownConfig",
    "MlpConfig",
    "MlpHost",
    "ResidualConfig",
    "ResidualHost",
    "ResnetConfig",
    "ResnetHost",
    "TcnConfig",
    "TcnHost",
    "TransformerConfig",
    "TransformerHost",
    "VitConfig",
    "VitHost",
    "build_host",
    "doubling",
    "host_slots",
    "pick_slots",
    "register_host",
]
