"""What the service reports about itself to monitoring systems."""
