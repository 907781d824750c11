"""Request and response models besides jobs, one file per resource; shared by the API, the client and the CLI.

Responses ignore unknown fields, so that a client works with a newer service; requests refuse them, so
that a misspelt field is not a silent default.
"""
