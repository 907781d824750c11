"""What the command line prints: jobs, events and plans as text, tables and curves."""
