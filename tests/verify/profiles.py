"""Profiles made by hand: what they say was measured nowhere."""

from __future__ import annotations

import time
from typing import Any

from runspec.core.schema import CalibrationProfile, RunSpec
from runspec.core.signed import SigningKey
from tests.verify.small_model import fixed_key
from verify import profile as form
from verify.calibration.derive import as_table
from verify.thresholds import Limits, limits_for

ROOT = fixed_key(9)
DAY_S = 86400.0
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": -1}
"""Of the small spec's pool."""


def made_profile(limits: Limits | None = None, **changes: Any) -> form.Profile:
    """A profile of the small spec's pool; keyword arguments replace fields of it."""
    sampler = changes.pop("sampler", {})
    side = {"engine": "vllm", "precision": "float32", "hardware": "cpu", "sampling": SAMPLING}
    side |= sampler
    validator = {"engine": "jax", "precision": "float32", "hardware": "cpu", "releases": {}}
    validator |= changes.pop("validator", {})
    limits = limits or limits_for(side["precision"], validator["precision"])
    now = time.time()
    fields: dict[str, Any] = {
        "version": 1,
        "formula": form.FORMULA,
        "issued": now,
        "expires": now + DAY_S,
        "rate": 1e-6,
        "sampler": side,
        "validator": validator,
        "model": {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 192},
        "measured": {
            "run": "made-up",
            "oldest_version": 0,
            "newest_version": 0,
            "submissions": 0,
            "rollouts": 0,
            "tokens": 0,
            "chunks": 0,
            "seeded": True,
        },
        "numbers": {},
        "looser": [],
        "limits": as_table(limits),
    }
    return form.Profile.model_validate({**fields, **changes})


def document(profile: form.Profile, key: SigningKey = ROOT) -> str:
    return form.sign_profile(profile, key).decode()


def with_profile(spec: RunSpec, *texts: str, **settings: object) -> RunSpec:
    """A spec that names profiles, and pins the root that signs profiles here."""
    names = ("measured", *map(str, range(1, len(texts))))
    items = [
        CalibrationProfile(name=name, document=text)
        for name, text in zip(names, texts, strict=True)
    ]
    verify = spec.verify.model_copy(update={"profiles": items, **settings})
    identity = spec.identity.model_copy(update={"root_public_key": ROOT.public_hex})
    return spec.model_copy(update={"verify": verify, "identity": identity})
