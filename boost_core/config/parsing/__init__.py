"""Parsing of user input: strict YAML and JSON, URLs, and files that are small by nature."""
