"""The data that a job names: its files, its folders of tokens, its tokenizers."""
