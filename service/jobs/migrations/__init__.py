"""The history of the database's tables, one revision a change; applied by ``service.jobs.database.migrate``."""
