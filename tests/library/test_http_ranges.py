"""Ranges over HTTPS: a certificate is checked, and reads stay interruptible under it."""

import datetime as dt
import ipaddress
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lensemble.errors import WeightsUnreachable
from lensemble.http_ranges import Patience, RangeReader, Stopped
from tests.node import range_server

QUICK = Patience(tries=1, first_wait_s=0.01, most_wait_s=1, silence_s=2)


def certificate(path: Path) -> Path:
    """Of 127.0.0.1, signed by itself, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@contextmanager
def secured(content: bytes, pem: Path) -> Iterator[range_server.Origin]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with range_server.serving(content, context) as origin:
        yield origin


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    pem = certificate(tmp_path / "cert.pem")
    with secured(bytes(1000), pem) as origin:
        reader = RangeReader(origin.url, patience=QUICK)
        with pytest.raises(WeightsUnreachable, match="self-signed"):
            reader.read(0, 10)


def test_ranges_come_over_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = certificate(tmp_path / "cert.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    whole = bytes(range(256)) * 8000
    with secured(whole, pem) as origin:
        reader = RangeReader(origin.url, patience=QUICK)
        assert reader.read(1000, 1_500_000) == whole[1000:1_501_000]
        assert reader.received_bytes == 1_500_000
        origin.hold_after = 0
        stopping = RangeReader(origin.url, origin.held.is_set, QUICK)
        with pytest.raises(Stopped):
            stopping.read(0, 100)
