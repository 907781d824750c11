"""The storage schemes that are served, on one code path through fsspec."""

SCHEMES = ("file", "s3")


def refuse_unknown_scheme(url: str) -> str:
    """Return ``url``; raise ``ValueError`` if it has a scheme that is not served. Plain paths are local."""
    scheme, separator, _ = url.partition("://")
    if separator and scheme not in SCHEMES:
        raise ValueError(f"{url!r} has the scheme {scheme!r}; use a local path, file:// or s3://")
    return url
