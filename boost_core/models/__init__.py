"""The model families: compositions of ``nn`` parts, a page each."""
