"""Certificates of the control service: a run's own authority, and files that may be replaced.

A run makes an authority of its own and issues one certificate per service; clients trust that
authority and nobody else. Nothing here is a public certificate, so nothing is revoked: an
authority lives as long as its run.
"""

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, cast

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.core.errors import PreflightError

CA_VARIABLE: Final = "PACELINE_CONTROL_CA"
"""Environment variable that names the file with the certificate that clients trust."""

BACKDATED: Final = timedelta(hours=1)
"""So that a machine whose clock is behind takes a fresh certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where a server's certificate chain and private key are, as PEM."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def new_authority(name: str, *, now: datetime, days: int = 365) -> KeyPair:
    """Return a fresh authority that may issue certificates, and nothing below it may.

    Args:
        name: shown to people, such as the run's id.
        now: with a time zone.
        days: how long it is valid.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    certificate = (
        _builder(subject, subject, key.public_key(), now=now, days=days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def issue(authority: KeyPair, hosts: Sequence[str], *, now: datetime, days: int = 90) -> KeyPair:
    """Return a server's certificate for these host names and addresses.

    Raises:
        ValueError: no host.
    """
    if not hosts:
        raise ValueError("a certificate is for at least one host name or address")
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is of another kind; make a new authority")  # noqa: TRY004 - a value
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(hosts[0]), issuer.subject, key.public_key(), now=now, days=days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return _pair(certificate, key)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return a server's credentials, read again for the next connection when a file changes.

    Raises:
        PreflightError: a file cannot be read.
    """
    seen = _stamp(files)
    first = _configuration(files)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal seen
        try:
            now = _stamp(files)
            if now == seen:
                return None
            fresh = _configuration(files)
        except PreflightError:
            # Being written just now: the certificate before serves until it is whole.
            return None
        seen = now
        return fresh

    # The stubs do not know that None means: as before.
    return grpc.dynamic_ssl_server_credentials(
        first, cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
    )


def read_trusted(path: Path) -> bytes:
    """Return the certificates that a client trusts, as PEM. Raises PreflightError."""
    data = _read(path)
    try:
        x509.load_pem_x509_certificates(data)
    except ValueError as exc:
        raise PreflightError(f"{path} holds no PEM certificate") from exc
    return data


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    key, certificate = _read(files.key), _read(files.certificate)
    try:
        loaded = serialization.load_pem_private_key(key, password=None)
        chain = x509.load_pem_x509_certificates(certificate)
    except (ValueError, TypeError) as exc:
        # Without the library's own words: they are about a secret.
        raise PreflightError(
            f"{files.certificate} and {files.key} must be a PEM certificate and a PEM private key "
            "without a password"
        ) from exc
    if chain[0].public_key() != loaded.public_key():
        raise PreflightError(f"{files.key} is not the key of {files.certificate}")
    return grpc.ssl_server_certificate_configuration([(key, certificate)])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise PreflightError(f"cannot read {path}: {exc.strerror or exc}") from exc


def _stamp(files: TlsFiles) -> tuple[int, ...]:
    try:
        found = [path.stat() for path in (files.certificate, files.key)]
    except OSError as exc:
        raise PreflightError(f"cannot read {exc.filename}: {exc.strerror or exc}") from exc
    return tuple(part for s in found for part in (s.st_mtime_ns, s.st_ino, s.st_size))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    *,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
