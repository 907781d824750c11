"""The decoder and its parts. None knows how many ranks there are: what they exchange goes through the strategy."""
