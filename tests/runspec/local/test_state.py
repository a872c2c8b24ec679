"""The state of a run, as others than its owner find it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.local.state import RunState

READ = (
    "import os, sys; from pathlib import Path; from runspec.local.state import RunState\n"
    "os.setuid(65534); print(RunState(Path(sys.argv[1])).run().name)"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("alive", [False, True])
def test_another_user_reads_a_run_that_he_may_not_write(alive: bool) -> None:
    # given a run of root's, in a folder that others may look into
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with closing(RunState(folder)) as state:
            state.begin("mine", "digest", 3)
            if not alive:
                state.close()
            for file in folder.iterdir():
                file.chmod(0o644)
            # when nobody in particular looks at it
            done = subprocess.run(
                [sys.executable, "-c", READ, name], capture_output=True, text=True, check=False
            )
    # then he is told
    assert done.stdout.strip() == "mine", done.stderr


def test_a_damaged_state_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="not a database") as error:
        RunState(tmp_path)
    assert "runspec delete" in error.value.remedy
