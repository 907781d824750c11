"""What the API takes and answers besides jobs, one file a resource; shared by the API, the client and the CLI.

Answers ignore fields that they do not know, so that a client gets on with a newer service; requests refuse them, so
that a misspelt field is not a silent default.
"""
