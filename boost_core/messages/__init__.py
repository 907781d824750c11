"""What a gang and its workers tell each other besides the job spec: reports and commands. Free of torch."""
