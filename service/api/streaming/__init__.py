"""Event streams: events are read and encoded once for all who follow a job."""
