"""The decoder, built from ``nn`` parts by the architecture."""
