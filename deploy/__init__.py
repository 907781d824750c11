"""What is shipped with the service, and what builds it."""
