"""The commands of ``boost``: one file for each, or for a few that belong together."""
