"""The scheduler as it was when every pass compared every job with every node: what decisions are checked against."""
