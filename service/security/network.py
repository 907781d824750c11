"""Who can reach the service, and whether its settings are safe for that."""

import ipaddress
import ssl

from service.settings import Settings


class UnsafeExposure(ValueError):
    """Settings that would expose the service to people who must not reach it; the message says what to do."""


def check_exposure(settings: Settings) -> None:
    """Refuse settings that would leave the service or its traffic unprotected.

    Raises:
        UnsafeExposure: The settings are unsafe, or the certificate or its key cannot be used.
    """
    if settings.tls_cert is not None or settings.tls_key is not None:
        if settings.tls_cert is None or settings.tls_key is None:
            needed = "--tls-cert and --tls-key (BOOST_TLS_CERT, BOOST_TLS_KEY)"
            raise UnsafeExposure(f"TLS needs both {needed}; give the missing one")
        if not settings.tls:
            raise UnsafeExposure("--no-tls (BOOST_TLS=false) and a certificate were given; give only one of them")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
        except OSError as error:  # ssl's own errors are among these
            problem = f"the certificate {settings.tls_cert} with the key {settings.tls_key} cannot be used"
            remedy = "give readable PEM files that belong together"
            raise UnsafeExposure(f"{problem}: {error.strerror or error}; {remedy}") from error
    if is_loopback(settings.host):
        return
    if not settings.auth:
        problem = f"without authentication the service listens only on the loopback address, not on {settings.host}"
        raise UnsafeExposure(f"{problem}; leave out --no-auth (BOOST_AUTH=false), or --host (BOOST_HOST)")
    if settings.tls and settings.tls_cert is None:
        problem = f"on {settings.host} others can read the traffic"
        remedy = "give --tls-cert and --tls-key (BOOST_TLS_CERT, BOOST_TLS_KEY), or --no-tls (BOOST_TLS=false)"
        raise UnsafeExposure(f"{problem}; {remedy} if a proxy in front of it terminates TLS")


def is_loopback(host: str) -> bool:
    """Whether a name or an address means the local machine, whoever resolves it."""
    name = host.strip("[]").lower().removesuffix(".")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_seen_over_tls(settings: Settings) -> bool:
    """Whether people reach the service over https: here, or at a proxy in front."""
    return settings.tls_cert is not None or not settings.tls
