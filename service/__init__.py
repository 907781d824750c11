"""The BOOST job service: the only package that knows HTTP, SQL and Ray."""
