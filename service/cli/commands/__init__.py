"""The commands of ``boost``, a file for each or for a few that belong together."""
