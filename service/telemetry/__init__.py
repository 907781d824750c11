"""What the service says about itself to monitoring systems."""
