"""What keeps Flower and its simulation from calling home."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

QUIET: Mapping[str, str] = MappingProxyType(
    {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
)
"""The environment of every Flower process: no telemetry, no check for updates, no usage statistics of Ray.

They are read when Flower's programs start, so they belong in the environment of ``flwr``, ``flower-superlink`` and
``flower-supernode``; setting them in an app is too late.
"""
