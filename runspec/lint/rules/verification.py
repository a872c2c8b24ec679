"""Rules on verification: what the check of untrusted work needs."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.spec.role_names import elsewhere, validator_names
from runspec.lint.registry import Context, Violation, rule


@rule("validator-hardware", "verification")
def validator_hardware(context: Context) -> Iterator[Violation]:
    """Validators must not share the learner's accelerators.

        verify.hardware is given, where the learner is on accelerators and validators start here

    One process holds a TPU chip, and JAX takes most of a GPU's memory as it starts. A validator
    without hardware of its own would be on the learner's, and one of the two dies. Validators
    that `placement.roles` leaves to others take what their machine has.
    """
    spec = context.spec
    if (
        spec.verify.hardware is None
        and spec.learner.hardware.kind != "cpu"
        and set(validator_names(spec)) - elsewhere(spec)
    ):
        yield Violation(
            ("verify", "hardware"),
            f"is null: {spec.verify.validators} validators would be on the learner's "
            f"{spec.learner.hardware.kind}",
            suggestion="say what one validator has, like {kind: h100-80g, count: 2}",
        )
