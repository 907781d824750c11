"""Reading what people wrote: strict YAML and JSON, URLs, files that are small by nature."""
