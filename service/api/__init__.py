"""The REST API. It reads and writes the record; what it accepts, the scheduler finds there."""
