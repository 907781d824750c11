"""The data that a job names: files, folders of tokens and tokenizers."""
