"""One release, one version: what runs on Ray's nodes has to be of the version of the service. Does not import Ray."""

from boost_core import __version__


def require_version(other: str, who: str) -> None:
    """Make sure that somebody else is of this version.

    Args:
        other: Its version.
        who: It, for people.

    Raises:
        ValueError: It is not.
    """
    if other != __version__:
        raise ValueError(
            f"{who} has BOOST {other}, but this process has {__version__}; run the same version of the API and of all "
            "of Ray's nodes: replace what is old, or roll back what is new"
        )
