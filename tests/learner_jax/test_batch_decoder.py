"""A learner's decoder: a process beside it that reads what a validator accepted."""

from __future__ import annotations

import sys
from contextlib import closing

import pytest

from learner_jax.batch import BatchReader
from runspec.core.errors import UserError
from tests.learner_jax.conftest import Run, tiny_spec
from tests.verify.decoder.pretended import BEGIN
from verify.decoder import Decoder
from verify.formats.submission import decode_rollouts
from verify.limits import largest_accepted_bytes, largest_submission_bytes


def test_one_process_reads_a_whole_run_as_this_one_would(run: Run) -> None:
    for step in range(3):
        run.add_step(step, version=step)
    root = run.root.public_hex
    with closing(Decoder()) as decoder:
        reader = BatchReader(run.path, run.spec, root, decode=decoder.decode)
        here = BatchReader(run.path, run.spec, root, decode=decode_rollouts)
        pids = set()
        for step in range(3):
            manifest = here.manifest(step)
            assert repr(reader.read(manifest)) == repr(here.read(manifest))
            pids.add(decoder.pid)
    assert len(pids) == 1 and None not in pids


def test_a_decoder_that_something_else_kills_is_this_machines_fault(run: Run) -> None:
    # given a machine on which the kernel ends every decoder
    run.add_step(0, version=0)
    kills = BEGIN + "os.kill(os.getpid(), 9)"
    with closing(Decoder(command=[sys.executable, "-S", "-c", kills])) as decoder:
        reader = BatchReader(run.path, run.spec, run.root.public_hex, decode=decoder.decode)
        # when a step is read, then nobody is blamed for the file
        with pytest.raises(UserError, match=r"of step 0 was not decoded: .*from outside") as caught:
            reader.read(reader.manifest(0))
    assert "memory left" in caught.value.remedy and "ban" not in caught.value.remedy


def test_what_was_accepted_before_a_restart_made_submissions_smaller_is_still_read() -> None:
    """A restart may change `groups_per_submission` and `max_model_len`."""
    spec = tiny_spec()
    (pool,) = spec.samplers
    for groups, length in ((1, 64), (4, 64), (1, 20), (99, 64)):
        changed = pool.model_copy(update={"groups_per_submission": groups, "max_model_len": length})
        after = spec.model_copy(update={"samplers": [changed]})
        assert largest_accepted_bytes(after) == largest_accepted_bytes(spec)
        assert largest_accepted_bytes(after) >= largest_submission_bytes(after)
