"""A certificate authority for a test, and certificates of 127.0.0.1 that it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from runspec.core.files import write_atomic


class Authority:
    """Signs certificates; `ca_file` is what its clients trust."""

    def __init__(self, folder: Path, name: str = "test") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} CA")])
        basic = x509.BasicConstraints(ca=True, path_length=None)
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(basic, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str = "server", passphrase: bytes | None = None) -> tuple[Path, Path]:
        """Writes a new certificate and its key, in place of any before; returns their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        address = x509.SubjectAlternativeName(
            [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        )
        certificate = (
            self._builder(subject, key.public_key())
            .add_extension(address, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        encryption = (
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption()
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        write_atomic(cert_file, certificate.public_bytes(serialization.Encoding.PEM))
        write_atomic(key_file, pem, mode=0o600)
        return cert_file, key_file

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )
