"""What a gang does next. Pure: events and their times in, decisions out."""
