"""One release, one version: Ray's nodes must run the service's version. Does not import Ray."""

from boost_core import __version__


def require_version(other: str, who: str) -> None:
    """Check that another process has this version.

    Args:
        other: Its version.
        who: What has that version, for the message.

    Raises:
        ValueError: The versions differ.
    """
    if other != __version__:
        raise ValueError(
            f"{who} has BOOST {other}, but this process has {__version__}; run the same version on the API and on all "
            "of Ray's nodes: upgrade the older one, or roll back the newer one"
        )
