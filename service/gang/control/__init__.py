"""A gang's next actions. Pure: events and their times in, decisions out."""
