"""The command line: ``boost``."""
