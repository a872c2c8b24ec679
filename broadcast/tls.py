"""A server's certificate and key."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from broadcast.reloaded import warn_if_open
from runspec.core.errors import UserError


def server_context(cert: Path, key: Path, log: logging.Logger) -> ssl.SSLContext:
    """TLS 1.2 or newer with a certificate chain and its key, PEM files.

    Raises:
        UserError: a file cannot be read, holds nothing of the kind, or the two do not belong
            together.
    """
    for path in (cert, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise UserError(f"cannot read: {error.strerror}", place=str(path)) from error
    warn_if_open(key, log)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # An empty passphrase, or OpenSSL would ask for one at the terminal and wait.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"is not the key of {cert}", place=str(key), remedy="give the pair that belongs"
            ) from error
        raise UserError(
            f"no certificate chain and key without a passphrase, as PEM: {error}",
            place=f"{cert}, {key}",
        ) from error
    return context
