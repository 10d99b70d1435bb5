"""Tests of what needs a framework of others are there where it is; see `make test-integrations`."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDS = {
    "test_envs.py": "stable_baselines3",
    "test_env_examples.py": "sb3_contrib",
    "test_ray.py": "ray",
}

collect_ignore = [file for file, package in _NEEDS.items() if find_spec(package) is None]
