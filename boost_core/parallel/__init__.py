"""Who holds what and who sends what: the device mesh, the counted collectives, and the tensor parallel strategies."""
