"""Modules, layers and marks of which models are made; see README.md for how they meet."""

from stagewright.nn.attention import Attention
from stagewright.nn.axes import (
    AxisName,
    AxisNames,
    AxisRules,
    VmappedDim,
    axes_metadata,
    axis_names,
    default_axis_rules,
    shard,
    shard_activation,
)
from stagewright.nn.dropout import Dropout
from stagewright.nn.embed import Embed, PositionEmbed
from stagewright.nn.layers import Layers
from stagewright.nn.linear import Linear
from stagewright.nn.loss import token_cross_entropy, token_mean
from stagewright.nn.mlp import MLP
from stagewright.nn.module import PipelinedModule
from stagewright.nn.norms import LayerNorm, RMSNorm
from stagewright.nn.partition import Balanced, Explicit, Partition, Uniform, group_segments
from stagewright.nn.rotary import Rotary
from stagewright.nn.yields import pipeline_yield

__all__ = [
    "MLP",
    "Attention",
    "AxisName",
    "AxisNames",
    "AxisRules",
    "Balanced",
    "Dropout",
    "Embed",
    "Explicit",
    "LayerNorm",
    "Layers",
    "Linear",
    "Partition",
    "PipelinedModule",
    "PositionEmbed",
    "RMSNorm",
    "Rotary",
    "Uniform",
    "VmappedDim",
    "axes_metadata",
    "axis_names",
    "default_axis_rules",
    "group_segments",
    "pipeline_yield",
    "shard",
    "shard_activation",
    "token_cross_entropy",
    "token_mean",
]
