"""`runspec relay`: it joins a real coordinator, is listed, and ends with 0 on Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from runspec.cli.relay import words_of
from runspec.core.address import JoinLink
from runspec.core.schema import Broadcast
from runspec.core.signed import SigningKey
from tests.harness import free_port
from tests.runspec.cli.in_process import runspec
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.test_relays import publish_weights
from tests.waiting import HANG_S, eventually


def test_a_relay_joins_is_listed_and_leaves(tmp_path: Path) -> None:
    site, port = Site(tmp_path, tiny_spec(broadcast=Broadcast(volunteers="any"))), free_port()
    publish_weights(site, tmp_path / "files")
    url = f"http://127.0.0.1:{port}"
    with site.origin(), site.serving():
        link = JoinLink(site.url, site.run, site.root.public_hex)
        words = ["relay", link, "--url", url, "--listen", f"127.0.0.1:{port}"]
        words += ["--key", tmp_path / "key", "--dir", tmp_path / "relay", "--max-bytes", "1GB"]
        command = [sys.executable, "-m", "runspec", *map(str, words)]
        with (tmp_path / "out").open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        text = (tmp_path / "out").read_text
        client = site.client(SigningKey.generate())
        try:
            eventually(lambda: url in client.site().relays, "listed", context=text)
            eventually(lambda: "MB/s measured" in text(), "its line", context=text)
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 0, text()
        finally:
            process.kill()
            process.wait()
        assert "left; thank you" in text()


def test_a_run_that_takes_none_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path, tiny_spec())
    with site.origin(), site.serving():
        link = JoinLink(site.url, site.run, site.root.public_hex)
        words = ["--url", "http://a.example", "--listen", "127.0.0.1:0", "--key", tmp_path / "key"]
        done = runspec("relay", str(link), *words)
    assert done.returncode == 1 and "takes no relays of volunteers" in done.stderr


def test_an_answer_in_words() -> None:
    assert words_of({"listed": True, "bytes_per_s": 84e6}) == "serving, 84 MB/s measured"
    wrong = {"listed": False, "reason": "version 7\x1b not\nthere yet", "bytes_per_s": None}
    assert words_of({"listed": True, "bytes_per_s": "fast"}) == "not listed: None"
    assert words_of(wrong) == "not listed: version 7? not there yet"
