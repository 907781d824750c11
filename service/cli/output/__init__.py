"""What the command line prints: jobs, events and plans in words, tables and curves."""
